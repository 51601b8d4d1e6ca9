"""The server engine against a small server of our own that misbehaves on demand: what is sent, what is read,
what is tried again."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from redline.engine import calls
from redline.engine.request import Completion, Request, Sampling
from redline.engine.server import ServerEngine
from redline.errors import ConfigError, MachineError, RedlineError

GREEDY = Sampling(max_new_tokens=8, temperature=0.0)
KEY = "sk-very-secret"

Answer = Callable[[dict[str, Any], int], tuple[int, Any] | None]


def completion(text: str, **choice: Any) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": "length", "logprobs": None, **choice}]}


class Fake:
    """A completion server. `answer(body, call)` gives status and body (a str is sent as it is), or None to
    break the connection."""

    def __init__(self) -> None:
        self.owner = "vllm"
        self.answer: Answer = lambda body, call: (200, completion(f"{body['seed']}"))
        self.models: Any = None
        self.closes = False
        """Whether connections are closed after an answer, without a word."""
        self.headers: dict[str, str] = {}
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.connections: set[Any] = set()
        self.paths: set[str] = set()
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # clients that hang up are part of the test
        self.hung_up = threading.Semaphore(0)
        """Released once for every connection that the server has closed."""
        closing = self.server.shutdown_request
        self.server.shutdown_request = lambda request: (closing(request), self.hung_up.release())[0]
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def engine(self, **options: Any) -> ServerEngine:
        return ServerEngine(self.url, **options)

    def _handler(fake) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if self.path == "/v1/models":
                    self.send(200, fake.models or {"data": [{"id": "tiny", "owned_by": fake.owner}]})
                else:
                    self.send(404, {"detail": "Not Found"})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with fake.lock:
                    fake.bodies.append(body)
                    fake.keys.add(self.headers["Authorization"])
                    fake.connections.add(self.client_address)
                    fake.paths.add(self.path)
                    call = len(fake.bodies)
                if (answer := fake.answer(body, call)) is not None:
                    closes = fake.closes  # read first: with the answer, the client is at its next call
                    self.send(*answer)
                    self.close_connection |= closes
                    return
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b'{"choices": [')
                self.close_connection = True

            def send(self, status: int, body: Any) -> None:
                data = (body if isinstance(body, str) else json.dumps(body)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                for name, value in fake.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.setattr(calls, "BACK_OFFS_S", (0.0, 0.01, 0.02))
    monkeypatch.delenv("REDLINE_API_KEY", raising=False)
    fake = Fake()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


def run(engine: ServerEngine, *requests: Request) -> list[Completion]:
    with engine:
        return list(engine.run(requests))


def refused(
    engine: Callable[[], ServerEngine], sampling: Sampling = GREEDY, prompt: Any = "a"
) -> RedlineError:
    """The error, which must be one line."""
    with pytest.raises(RedlineError) as caught:
        run(engine(), Request(prompt=prompt, sampling=sampling))
    assert "\n" not in str(caught.value)
    return caught.value


# ---- what is sent and read ----


def test_every_sample_is_a_call_whose_seed_is_its_own_and_does_not_depend_on_the_split(fake: Fake) -> None:
    whole = run(fake.engine(), Request(prompt="a", sampling=GREEDY, samples=5, seed=3, tag="x"))
    parts = run(
        fake.engine(),
        Request(prompt="a", sampling=GREEDY, samples=2, seed=3),
        Request(prompt="a", sampling=GREEDY, samples=3, first_sample=2, seed=3),
    )
    texts = {completion.sample: completion.text for completion in whole}
    assert texts == {completion.sample: completion.text for completion in parts}
    assert len(set(texts.values())) == 5
    assert sorted(texts) == list(range(5))
    assert {completion.request.tag for completion in whole} == {"x"}
    other = run(fake.engine(), Request(prompt="a", sampling=GREEDY, seed=4))
    assert other[0].text not in texts.values()
    assert all(0 <= body["seed"] < 2**31 for body in fake.bodies)


def test_sampling_is_sent_in_full_so_that_the_models_own_settings_do_not_count(fake: Fake) -> None:
    plain = Sampling(max_new_tokens=7, temperature=0.5, top_p=0.9)
    full = Sampling(max_new_tokens=7, top_k=4, stop_strings=("END",))
    run(fake.engine(), Request(prompt="a", sampling=plain), Request(prompt=(1, 2), sampling=full))
    first, second = sorted(fake.bodies, key=lambda body: body["temperature"])
    neutral = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    expected = {"model": "tiny", "prompt": "a", "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, **neutral}
    assert {name: first[name] for name in expected} == expected
    assert "stop" not in first
    expected = {"prompt": [1, 2], "top_k": 4, "stop": ["END"]}
    assert {name: second[name] for name in expected} == expected


@pytest.mark.parametrize(
    "choice",
    [
        {"token_ids": [7, 8], "logprobs": {"tokens": ["x", "y"], "token_logprobs": [-0.5, -1.5]}},
        {
            "logprobs": {
                "content": [
                    {"id": 7, "token": "x", "logprob": -0.5},
                    {"id": 8, "token": "y", "logprob": -1.5},
                ]
            }
        },
    ],
    ids=["vllm", "llamacpp"],
)
def test_tokens_and_log_probabilities_are_read_where_told(fake: Fake, choice: dict[str, Any]) -> None:
    fake.answer = lambda body, call: (200, completion("xy", **choice))
    [found] = run(fake.engine(), Request(prompt="a", sampling=GREEDY))
    assert (found.tokens, found.logprobs, found.finish) == ((7, 8), (-0.5, -1.5), "length")


def test_token_strings_without_ids_are_not_guessed_at(fake: Fake) -> None:
    fake.answer = lambda body, call: (
        200,
        completion("xy", logprobs={"tokens": ["x", "y"], "token_logprobs": [-0.5, -1.5]}),
    )
    [found] = run(fake.engine(), Request(prompt="a", sampling=GREEDY))
    assert (found.tokens, found.logprobs) == ((), ())


def test_a_stop_text_that_the_server_left_in_place_is_cut(fake: Fake) -> None:
    fake.answer = lambda body, call: (200, completion("one END two STOP"))
    [found] = run(fake.engine(), Request(prompt="a", sampling=Sampling(stop_strings=("STOP", "END"))))
    assert (found.text, found.finish) == ("one ", "stop")


def test_what_a_server_cannot_do_is_refused(fake: Fake) -> None:
    fake.owner = "somebody"
    assert "does not take top_k: leave it out" in str(refused(fake.engine, Sampling(top_k=3)))
    assert fake.bodies == []
    run(fake.engine(), Request(prompt="a", sampling=GREEDY))
    assert "top_k" not in fake.bodies[0]


def test_a_chat_endpoint_is_asked_with_messages(fake: Fake) -> None:
    fake.answer = lambda body, call: (
        200,
        {
            "choices": [
                {
                    "message": {"role": "assistant", "content": "Hi"},
                    "finish_reason": "stop",
                    "token_ids": [7, 8],
                    "logprobs": {
                        "content": [{"token": "H", "logprob": -0.5}, {"token": "i", "logprob": -1.5}]
                    },
                }
            ],
            "usage": {"completion_tokens": 2},
        },
    )
    said = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"})
    found = run(
        ServerEngine(f"{fake.url}/v1/chat/completions/"),
        Request(prompt="Hello", sampling=Sampling(temperature=0.0, max_new_tokens=1)),
        Request(prompt="Hello", messages=said, sampling=Sampling(temperature=0.0, max_new_tokens=2)),
    )
    assert fake.paths == {"/v1/chat/completions"}
    bodies = {body["max_tokens"]: body for body in fake.bodies}
    assert bodies[1]["messages"] == [{"role": "user", "content": "Hello"}]
    assert bodies[2]["messages"] == list(said)
    assert all("prompt" not in body and body["logprobs"] is True for body in fake.bodies)
    assert {(c.text, c.finish, c.tokens, c.logprobs) for c in found} == {("Hi", "stop", (7, 8), (-0.5, -1.5))}


# ---- the stream ----


def test_requests_are_asked_for_only_with_room_and_at_most_so_many_calls_fly(fake: Fake) -> None:
    flying, most, lock, together = 0, 0, threading.Lock(), threading.Barrier(3)

    def answer(body: dict[str, Any], call: int) -> tuple[int, Any]:
        nonlocal flying, most
        with lock:
            flying += 1
            most = max(most, flying)
        if call <= 3:
            together.wait(60)  # none of the first three is answered before all of them are there
        with lock:
            flying -= 1
        return 200, completion("x")

    fake.answer = answer
    asked, seen, lead = 0, 0, 0

    def requests() -> Iterator[Request]:
        nonlocal asked, lead
        for _ in range(10):
            asked += 1
            lead = max(lead, asked * 2 - seen)
            yield Request(prompt="a", sampling=GREEDY, samples=2)

    with fake.engine(concurrency=3) as engine:
        for _ in engine.run(requests()):
            seen += 1
    assert (seen, len(fake.bodies), most) == (20, 20, 3)
    assert lead <= 3 + 2, "no request is taken before the samples of the one before fly"
    assert len(fake.connections) <= 3, "connections are kept open"


def test_none_means_later(fake: Fake) -> None:
    """A generator that decides by what it has seen: its second request needs the completion of its first."""
    seen: list[str] = []

    def requests() -> Iterator[Request | None]:
        yield None
        yield Request(prompt="a", sampling=GREEDY)
        while not seen:
            yield None
        yield Request(prompt=seen[0], sampling=GREEDY)

    with fake.engine() as engine:
        for found in engine.run(requests()):
            seen.append(found.text)  # noqa: PERF401  (the requests look at it meanwhile)
    assert [body["prompt"] for body in fake.bodies] == ["a", seen[0]]


def test_a_reader_that_stops_early_does_not_wait_for_the_rest(fake: Fake) -> None:
    release, others = threading.Event(), list[int]()

    def answer(body: dict[str, Any], call: int) -> tuple[int, Any]:
        if call > 1:
            release.wait()
            others.append(call)
        return 200, completion("x")

    fake.answer = answer
    before = set(threading.enumerate())
    with fake.engine(concurrency=4) as engine:
        stream = engine.run([Request(prompt="a", sampling=GREEDY, samples=4)])
        next(stream)
        stream.close()
    for thread in {*threading.enumerate()} - before:
        if thread.name.startswith("redline-server"):
            thread.join()
    assert others == []
    release.set()


# ---- faults ----


def test_a_busy_server_is_tried_again_after_the_time_it_asks_for(fake: Fake) -> None:
    told: list[str] = []
    fake.headers = {"Retry-After": "1"}
    fake.answer = lambda body, call: (
        (429, {"error": {"message": "slow down"}}) if call == 1 else (200, completion("x"))
    )
    [found] = run(fake.engine(progress=told.append), Request(prompt="a", sampling=GREEDY))
    assert found.text == "x"
    assert "429 slow down; trying again in 1.0 s" in told[0]
    assert fake.bodies[0] == fake.bodies[1]


@pytest.mark.parametrize(
    "fault", [None, (503, "loading"), (500, {"error": "oops"})], ids=["broken connection", "503", "500"]
)
def test_a_passing_fault_is_tried_again_and_a_lasting_one_told(
    fake: Fake, fault: tuple[int, Any] | None
) -> None:
    fake.answer = lambda body, call: fault if call < 3 else (200, completion("x"))
    assert [found.text for found in run(fake.engine(), Request(prompt="a", sampling=GREEDY))] == ["x"]
    fake.answer = lambda body, call: fault
    error = refused(fake.engine)
    assert isinstance(error, MachineError)
    assert "in 4 tries" in str(error)


def test_an_idle_connection_that_the_server_closed_is_no_fault(fake: Fake) -> None:
    told: list[str] = []
    with fake.engine(concurrency=1, progress=told.append) as engine:
        for number in range(3):
            fake.closes = number < 2
            [found] = engine.run([Request(prompt="a", sampling=GREEDY)])
            assert found.text
            if fake.closes:
                assert fake.hung_up.acquire(timeout=60)
    assert told == []
    assert len(fake.connections) == 3


def test_a_slow_server_is_given_up_with_the_limit_named(fake: Fake) -> None:
    given_up = threading.Event()
    fake.answer = lambda body, call: (given_up.wait(), (200, completion("x")))[1]
    error = refused(lambda: fake.engine(timeout_s=0.1))
    given_up.set()
    assert isinstance(error, MachineError)
    assert "within 0.1 s: lower sample.max_new_tokens" in str(error), "what a recipe can change"
    assert len(fake.bodies) <= 1, "it is not asked again"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (
            (200, "<html>Welcome\nto my page</html>"),
            "must answer /completions with a JSON object, got <html>Welcome to my page</html>",
        ),
        ((200, {"choices": []}), "must answer with one completion"),
        ((200, {"choices": [{"text": None, "finish_reason": "stop"}]}), "must answer with one completion"),
        ((200, {"choices": [{"text": "x", "finish_reason": "content_filter"}]}), "ended by stop or length"),
        (
            (200, completion("x", token_ids=[1], logprobs={"token_logprobs": [-1.0, -2.0]})),
            "must answer with one completion",
        ),
        ((404, {"detail": "Not Found"}), "refused /completions: 404 Not Found"),
        ((404, {"error": {"message": "The model `x` does not exist."}}), "does not exist"),
        ((422, {"detail": "Unexpected fields in the request: {'top_k'}"}), "Unexpected fields"),
        ((302, ""), "refused /completions: 302"),
        ((200, "[" * 100_000), "with a JSON object"),
        ((200, '{"choices": ' + "9" * 5000 + "}"), "with a JSON object"),
        *(
            (
                (200, completion("x", token_ids=[wrong], logprobs={"token_logprobs": [-1.0]})),
                "must answer with one completion",
            )
            for wrong in (2**70, -1, 1.5, True)
        ),
        *(
            (
                (200, completion("x") | {"usage": {"completion_tokens": wrong}}),
                "must answer with one completion",
            )
            for wrong in ("many", float("inf"))
        ),
    ],
)
def test_an_answer_that_is_no_completion_is_one_clear_line(
    fake: Fake, answer: tuple[int, Any], says: str
) -> None:
    fake.answer = lambda body, call: answer
    error = refused(fake.engine)
    assert isinstance(error, ConfigError)
    assert says in str(error)
    assert len(fake.bodies) == 1, "it would say the same again"


def test_a_model_that_the_server_does_not_have(fake: Fake) -> None:
    assert "has no model 'tinny' (did you mean 'tiny'?); it has tiny" in str(
        refused(lambda: fake.engine(model="tinny"))
    )
    fake.models = {"data": [{"id": "one"}, {"id": "two"}]}
    said = str(refused(fake.engine))
    assert said.startswith("name one of the models of http")
    assert said.endswith(": it has one, two")
    assert fake.engine(model="one").model == "one"


def test_a_server_that_is_not_one(fake: Fake) -> None:
    fake.models = {"data": ["what?"]}
    assert "must list models as OpenAI does" in str(refused(fake.engine))
    fake.server.shutdown()
    fake.server.server_close()
    assert "no answer from http://127.0.0.1" in str(refused(fake.engine))


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "ftp://host",
        "http://",
        "http://host:port",
        "http://host:99999",
        "http://me:word@host",
        "http://host/v1?a=b",
    ],
)
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="a server's URL must") as caught:
        ServerEngine(url)
    assert "word" not in str(caught.value)


def test_the_key_comes_from_the_environment_and_is_never_printed(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(fake.engine(), Request(prompt="a", sampling=GREEDY))
    monkeypatch.setenv("REDLINE_API_KEY", KEY)
    run(fake.engine(), Request(prompt="a", sampling=GREEDY))
    assert fake.keys == {None, f"Bearer {KEY}"}
    fake.answer = lambda body, call: (401, {"error": {"message": f"Incorrect API key provided: {KEY}"}})
    said = str(refused(fake.engine))
    assert "REDLINE_API_KEY" in said
    assert KEY not in said
    assert KEY not in repr(vars(fake.engine()))
    monkeypatch.setenv("REDLINE_API_KEY", f"{KEY}\nX-Other: 1")
    assert KEY not in str(refused(fake.engine))
