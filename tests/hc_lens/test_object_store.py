"""Records on an object store that fails: nothing is lost, nothing is read half."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from hc_lens.records import DamagedWarning, Records, RecordsError, digest
from tests import object_store
from tests.object_store import KINDS, SLOW, set_environment

FILES = {"a.bin": bytes(range(256)) * 200, "deep/b.csv": b"x,y\n1,2\n"}
OTHER = {name: content[::-1] for name, content in FILES.items()}
SOON = 30.0
"""Seconds within which an address that does not work must be told."""


@pytest.fixture(scope="module")
def running():
    with object_store.serve() as server:
        yield server


@pytest.fixture
def server(running, monkeypatch):
    """The server without faults, named in the environment."""
    set_environment(monkeypatch, running.endpoint)
    yield running
    running.fail(0, seed=0)
    running.refused, running.on_request = None, lambda method, path: None
    running.failed.clear()


@contextlib.contextmanager
def once(server, method: str, name: str, act):
    """Do something just before the server answers the first request of this kind."""
    left = [act]

    def look(asked: str, path: str) -> None:
        if asked == method and path.endswith(name) and left:
            left.pop()()

    server.on_request = look
    yield
    assert not left, "the moment never came"


@contextlib.contextmanager
def undamaged():
    """No record is called damaged meanwhile."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", DamagedWarning)
        yield


def test_a_record_is_read_as_it_was_written(server):
    records = Records(server.address("plain"), "test")
    assert records.read("runs/one") is None
    records.write("runs/one", FILES, "k")
    assert Records.existing(server.address("plain"), "test").read("runs/one", "k") == FILES
    assert records.read("runs/one", "other") is None
    assert records.names("runs") == ["one"]
    held = server.objects("plain")
    assert {name: held[name] for name in held if name.startswith("runs/one/")} == {
        **{f"runs/one/{digest(content)}/{name}": content for name, content in FILES.items()},
        "runs/one/done.json": held["runs/one/done.json"],
    }
    records.remove("runs/one")
    assert records.read("runs/one") is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_fault_hits_is_done_again_until_it_is_whole(server, kind):
    name = kind.replace(" ", "-")
    server.fail(0.2, seed=3, kinds=(kind,))
    with undamaged():
        records = Records(server.address(name), "test")
        for number in range(2):
            records.write(f"runs/{number}", FILES)
            assert records.read(f"runs/{number}") == FILES
    assert server.failed[kind] >= 1
    held = server.objects(name)
    for number in range(2):
        for file, content in FILES.items():
            assert held[f"runs/{number}/{digest(content)}/{file}"] == content


def test_half_an_object_is_never_read_and_the_record_is_written_again(server):
    records = Records(server.address("half"), "test")
    for file in [*(f"{digest(content)}/{name}" for name, content in FILES.items()), "done.json"]:
        records.write("one", FILES)
        whole = server.objects("half")[f"one/{file}"]
        server.put(f"half/one/{file}", whole[: len(whole) // 2])
        with pytest.warns(DamagedWarning, match=f"half/one/{file} is damaged or gone"):
            assert records.read("one") is None
        records.write("one", FILES)
        with undamaged():
            assert records.read("one") == FILES


def test_a_record_without_its_last_object_is_not_there(server):
    records = Records(server.address("begun"), "test")
    for file, content in FILES.items():
        server.put(f"begun/one/{digest(content)}/{file}", content)
    with undamaged():
        assert records.read("one") is None
        records.write("one", FILES)
        assert records.read("one") == FILES


def test_an_object_that_was_kept_half_in_silence_is_noticed_when_it_is_written(server):
    records = Records(server.address("silent"), "test")
    place = f"{digest(FILES['a.bin'])}/a.bin"

    def damage() -> None:
        server.put(f"silent/one/{place}", FILES["a.bin"][:100])

    with undamaged(), once(server, "PUT", "one/done.json", damage):
        records.write("one", FILES)
    assert records.read("one") == FILES

    def always(method: str, path: str) -> None:
        if method == "PUT" and path.endswith("two/done.json"):
            server.put(f"silent/two/{place}", b"half")

    server.on_request = always
    with pytest.raises(RecordsError, match=r"two as it was read back is not what was written"):
        records.write("two", FILES)


def test_a_record_that_is_replaced_while_it_is_read_is_read_whole_as_it_was(server):
    records = Records(server.address("replaced"), "test")
    writer = Records(server.address("replaced"), "test")
    for key in (None, "old"):
        records.write("one", FILES, "old")
        with (
            undamaged(),
            once(server, "GET", "a.bin", lambda: writer.write("one", OTHER, "new")),
        ):
            assert records.read("one", key) == FILES
        assert records.read("one", "new") == OTHER


def test_a_record_stays_as_it_is_until_its_successor_is_whole(server):
    records = Records(server.address("stopped"), "test")
    records.write("one", FILES, "old")

    def refuse() -> None:
        server.refused = ("403 Forbidden", "AccessDenied")

    with once(server, "PUT", "deep/b.csv", refuse), pytest.raises(RecordsError, match="stopped"):
        records.write("one", OTHER, "new")
    server.refused = None
    with undamaged():
        assert records.read("one", "new") is None
        assert records.read("one") == FILES
        records.write("one", OTHER, "new")
        assert records.read("one", "new") == OTHER
    records.remove("one")
    assert not any("one" in name for name in server.objects("stopped"))


def test_another_who_writes_the_same_record_at_the_same_time_leaves_it_whole(server):
    mine = Records(server.address("twice"), "test")
    other = Records(server.address("twice"), "test")
    for number, moment in enumerate(("a.bin", "deep/b.csv", "one/done.json")):
        name = f"{number}/one"
        with (
            undamaged(),
            once(server, "PUT", moment, lambda name=name: other.write(name, OTHER, "k")),
        ):
            mine.write(name, FILES, "k")
        assert mine.read(name, "k") in (FILES, OTHER)


WRITER = """
import json, sys
from hc_lens.records import Records
address, mark = sys.argv[1:]
records = Records(address, "test")
sys.stdin.readline()
for number in range(12):
    records.write(f"runs/{number}", {"a": mark.encode() * 1000, "b": mark.encode() * 50}, "k")
    found = records.read(f"runs/{number}", "k")
    print(json.dumps(sorted({chr(byte) for content in found.values() for byte in content})))
"""


@pytest.mark.slow
def test_processes_that_write_the_same_records_leave_each_of_them_whole(server):
    server.fail(0.05, seed=1, kinds=(SLOW,))
    address = server.address("processes")
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", WRITER, address, mark],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for mark in "xy"
    ]
    time.sleep(1)
    said = []
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in started:
        said.append([json.loads(line) for line in process.communicate(timeout=60)[0].splitlines()])
        assert process.returncode == 0
    assert all(marks in (["x"], ["y"]) for marks in said[0] + said[1])
    assert [len(lines) for lines in said] == [12, 12]
    records = Records.existing(address, "test")
    with undamaged():
        assert all(records.read(f"runs/{number}", "k") for number in range(12))


@pytest.mark.parametrize(
    ("status", "code"),
    [
        ("403 Forbidden", "AccessDenied"),
        ("403 Forbidden", "InvalidAccessKeyId"),
        ("403 Forbidden", "SignatureDoesNotMatch"),
    ],
)
def test_an_address_that_refuses_is_one_line_that_names_it(server, status, code):
    address = server.address("refused")
    records = Records(address, "test")
    server.refused = (status, code)
    for call in (
        lambda: Records(address, "test"),
        lambda: Records.existing(address, "test"),
        lambda: records.read("one"),
        lambda: records.names(),
        lambda: records.remove("one"),
    ):
        with pytest.raises(RecordsError, match=r"\[?Forbidden|says the store") as caught:
            call()
        assert address in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1
        assert "keys" in str(caught.value) or "access" in str(caught.value)


def test_a_missing_bucket_is_told_and_not_made(server):
    start = time.monotonic()
    with pytest.raises(RecordsError, match="s3://no-such-bucket/runs, got FileNotFoundError"):
        Records("s3://no-such-bucket/runs", "test")
    assert server.buckets() == [server.bucket]
    assert time.monotonic() - start < SOON


def test_missing_keys_are_told(server, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    object_store.S3FileSystem.clear_instance_cache()
    with pytest.raises(
        RecordsError, match=r"read s3://.*NoCredentialsError.* its bucket, keys and"
    ):
        Records(server.address("keys"), "test")


@pytest.mark.slow
def test_an_endpoint_that_is_down_is_told_soon(monkeypatch):
    with object_store.serve() as gone:
        pass
    set_environment(monkeypatch, gone.endpoint)
    start = time.monotonic()
    with pytest.raises(RecordsError, match=r"read s3://b/runs, got EndpointConnectionError"):
        Records("s3://b/runs", "test")
    assert time.monotonic() - start < SOON


def test_the_general_variable_of_the_endpoint_is_known_too(server, monkeypatch):
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    object_store.S3FileSystem.clear_instance_cache()
    Records(server.address("general"), "test").write("one", FILES)
    assert FILES["a.bin"] in server.objects("general").values()
