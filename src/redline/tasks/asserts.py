"""From a test program of asserts to calls and values: what to run in the sandbox, and what to compare outside.

from_asserts("assert f(2) == 4")      # '{"setup": "", "calls": ["f(2)"], "values": ["4"]}'
"""

import ast
import json
from typing import Any


def from_asserts(source: str, setup: str = "") -> str | None:
    """The reference answer that a test program of asserts stands for, top-level or in a `check(candidate)` that
    is called at the end; None where a test does more than compare a call with a value."""
    try:
        calls, values = _calls_and_values(ast.parse(source).body)
    except (SyntaxError, ValueError, RecursionError):
        return None
    return json.dumps({"setup": setup, "calls": calls, "values": values})


def _calls_and_values(body: list[ast.stmt]) -> tuple[list[str], list[str]]:
    calls: list[str] = []
    values: list[str] = []
    candidate = "_"
    for statement in body:
        match statement:
            case ast.Assert(test=test):
                call, value = _halves(test)
                calls.append(ast.unparse(call))
                values.append(_written(value_of(value)))
            case ast.FunctionDef(args=ast.arguments(args=names), body=inner) if len(names) < 2:
                inner_calls, inner_values = _calls_and_values(inner)
                calls, values = calls + inner_calls, values + inner_values
                candidate = names[0].arg if names else "_"
            case ast.Expr(value=ast.Call(args=[tested])) if calls:
                calls = [f"(lambda {candidate}: {call})({ast.unparse(tested)})" for call in calls]
            case (
                ast.Expr(value=ast.Call(args=[]))
                | ast.Import()
                | ast.ImportFrom()
                | ast.Expr(value=ast.Constant())
                | ast.Assign(targets=[ast.Name(id="METADATA")])
            ):
                pass
            case _:
                raise ValueError(f"not a plain test: {ast.unparse(statement)[:80]}")
    return calls, values


def _halves(test: ast.expr) -> tuple[ast.expr, ast.expr]:
    """The expression that a test runs, and the value that it expects."""
    match test:
        case ast.Compare(left=call, ops=[ast.Eq() | ast.Is()], comparators=[value]):
            return call, value
        case ast.Call() | ast.UnaryOp(op=ast.Not()):
            return ast.Call(ast.Name("bool"), [test], []), ast.Constant(True)
    raise ValueError(f"not a comparison: {ast.unparse(test)[:80]}")


def _written(value: Any) -> str:
    """The repr of a value, with sets in order: their own changes from process to process, and a question must not."""
    match value:
        case set() if value:
            return f"{{{', '.join(sorted(map(_written, value)))}}}"
        case list():
            return f"[{', '.join(map(_written, value))}]"
        case tuple():
            return f"({', '.join(map(_written, value))}{',' * (len(value) == 1)})"
        case dict():
            return f"{{{', '.join(f'{key!r}: {_written(held)}' for key, held in value.items())}}}"
    return repr(value)


def value_of(expression: ast.expr) -> Any:
    """The value of a literal, or of a set, tuple or list made from one."""
    match expression:
        case ast.Call(func=ast.Name(id="set" | "tuple" | "list" as kind), args=[inner], keywords=[]):
            return {"set": set, "tuple": tuple, "list": list}[kind](value_of(inner))
    return ast.literal_eval(expression)
