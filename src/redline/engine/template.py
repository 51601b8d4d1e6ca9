"""Chat templates, rendered in a separate process: they come with foreign weights and are programs.

    fill(template, messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=True)

Jinja's sandbox keeps a template from files and attributes, but not from endless loops or texts that fill the memory.
So the process may take PROCESSOR_S of processor time for a text (which does not depend on how busy the machine is) and
MEMORY_BYTES of memory; when it dies, the next text gets a new one. Left out: tools and documents.
"""

import contextlib
import functools
import json
import math
import os
import resource
import subprocess
import sys
import threading
import time
from typing import Any

from redline.errors import DataError

PROCESSOR_S = 5
MEMORY_BYTES = 1 << 30
LONGEST = 4 << 20
"""Most characters of a rendered prompt; more than any context holds."""

_lock = threading.Lock()
_process: subprocess.Popen[str] | None = None


def fill(template: str, **values: Any) -> str:
    """The template with the values put in, or one line that says why not."""
    global _process
    with _lock:
        if _process is None or _process.poll() is not None:
            _process = subprocess.Popen(
                [sys.executable, "-P", "-m", "redline.engine.template", str(PROCESSOR_S)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUTF8": "1"},
                start_new_session=True,  # Ctrl-C is for us
            )
        assert _process.stdin is not None
        assert _process.stdout is not None
        answer = ""
        try:
            with contextlib.suppress(BrokenPipeError):
                _process.stdin.write(json.dumps([template, values]) + "\n")
                _process.stdin.flush()
                answer = _process.stdout.readline()
        finally:
            if not answer.endswith(
                "\n"
            ):  # it died, or its answer to an interrupted call would be the next one's
                _process.kill()
                _process.wait()
    died = "", f"it took more than {PROCESSOR_S} s or {MEMORY_BYTES >> 30} GiB of memory"
    text, why = json.loads(answer) if answer.endswith("\n") else died
    if why:
        raise DataError(
            f"the model's chat template cannot render this prompt: {why}; try prompt.shots=0 or prompt.mode=text, or"
            " leave out --chat"
        )
    return str(text)


def main(processor_s: int) -> None:
    """Render what comes in, one line each, until there is no more."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, hard))
    for line in sys.stdin:
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + processor_s, hard))
        template, values = json.loads(line)
        try:
            text, why = _compiled(template).render(**values), ""
            text.encode()  # half a surrogate pair is not text
            if len(text) > LONGEST:
                text, why = "", f"it gives {len(text):,} characters, but at most {LONGEST:,} are allowed"
        except Exception as error:  # noqa: BLE001 - whatever a foreign program raises is its failure
            text, why = "", " ".join(f"{type(error).__name__}: {error}".split())[:200]
        print(json.dumps([text, why]), flush=True)  # noqa: T201 - the pipe to the other side


@functools.cache
def _compiled(template: str) -> Any:
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    for name in ("bos_token", "eos_token"):
        if name in template:
            refuse(f"it uses {name}, which is not known here: write the token itself into the template")
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    return environment.from_string(template)


if __name__ == "__main__":
    main(int(sys.argv[1]))
