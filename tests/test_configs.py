"""Config files: strict, atomic, locked, never lost, never fatal."""
import concurrent.futures
import multiprocessing
import time
from pathlib import Path

import filelock
import msgspec
import pytest

from sm70_triton import configs, registry
from sm70_triton.ops import kv_write
from sm70_triton.types import Geometry

GEOMETRY = kv_write.KvWriteGeometry(kv_dtype="e4m3", kv_heads=4, head_dim=256, page_size=784, tokens=64)
OP = registry.get("kv_write")


def bucket(tokens=64, block=2):
    evidence = configs.Measured(device="Tesla V100-SXM2-32GB", us=3.25, triton="3.6.0", driver="550.1")
    return configs.Bucket(at={"tokens": tokens}, impl="simt", rev=1, plan={"block_t": block, "num_warps": 1}, evidence=evidence)


def test_round_trip_and_path():
    file = configs.write(70, "kv_write", GEOMETRY, bucket())
    assert file == configs.user_root() / "sm70/kv_write/e4m3.kv_heads4.head_dim256.page_size784.json"
    config = configs.decode(file)
    assert config.buckets == [bucket()] and config.static == GEOMETRY.static()
    configs.write(70, "kv_write", GEOMETRY, bucket(1))
    configs.write(70, "kv_write", GEOMETRY, bucket(64, block=4))
    assert configs.decode(file).buckets == [bucket(1), bucket(64, block=4)]


def test_static_axes_in_a_name_are_unambiguous():
    class Shape(Geometry, frozen=True, kw_only=True):
        DYNAMIC = ("m",)
        m: int = 1
        a: bool = False
        b: bool = False
        c: int = 0

    names = {configs.stem(Shape(a=a, b=b, c=c)) for a in (False, True) for b in (False, True) for c in (0, 1, 12)}
    assert len(names) == 12


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: text.replace('"schema": 1', '"schema": 0'),
        lambda text: text.replace('"impl"', '"implementation"'),
        lambda text: text.replace('"rev": 1,', '"rev": 1, "speed": 9,'),
        lambda text: text.replace('"source": "measured"', '"source": "guess"'),
        lambda text: text.replace('"tokens": 64', '"tokens": 0'),
        lambda text: text.replace('"head_dim": 256', '"head_dim": 128'),
        lambda text: "\x00\xff" * 20,
        lambda text: "[]",
        lambda text: text.replace('"tokens": 64', '"tokens": 64.0'),
        lambda text: text.replace('"kv_dtype": "e4m3"', '"kv_dtype": ' + "[" * 100_000 + "]" * 100_000),
    ],
)
def test_a_damaged_file_is_moved_aside_and_the_default_serves(damage, caplog):
    file = configs.write(70, "kv_write", GEOMETRY, bucket())
    before = file.read_text()
    after = damage(before)
    assert after != before
    file.write_text(after)
    route = registry.resolve(OP, GEOMETRY, 70)
    assert route.source == "default"
    assert not file.exists() and len(list(file.parent.glob("*.corrupt-*"))) == 1
    assert "was moved to" in caplog.text
    configs.write(70, "kv_write", GEOMETRY, bucket())
    registry.clear()
    assert registry.resolve(OP, GEOMETRY, 70).source == "user"


def test_a_damaged_shipped_file_is_left_where_it_is(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(configs, "shipped_root", lambda: tmp_path)
    file = configs.write(70, "kv_write", GEOMETRY, bucket(), root=tmp_path)
    file.write_text("{")
    assert registry.resolve(OP, GEOMETRY, 70).source == "default"
    assert file.read_text() == "{" and "passed over" in caplog.text
    with pytest.raises(configs.CorruptConfig):
        configs.write(70, "kv_write", GEOMETRY, bucket(), root=tmp_path)
    assert file.read_text() == "{"


def test_a_crash_while_writing_keeps_the_old_file(monkeypatch):
    file = configs.write(70, "kv_write", GEOMETRY, bucket())
    before = file.read_bytes()

    def broken(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(configs.os, "fsync", broken)
    with pytest.raises(OSError):
        configs.write(70, "kv_write", GEOMETRY, bucket(1))
    assert file.read_bytes() == before
    assert not [p for p in file.parent.iterdir() if p.name.startswith(f".{file.name}.") and not p.name.endswith(".lock")]


@pytest.mark.parametrize("at", [{"M": 1}, {}, {"tokens": 0}, {"tokens": 1, "M": 1}])
def test_a_bucket_must_name_the_dynamic_axes(at):
    with pytest.raises(ValueError, match=r"exactly \['tokens'\], with values of at least 1"):
        configs.write(70, "kv_write", GEOMETRY, msgspec.structs.replace(bucket(), at=at))


def test_a_bucket_of_astronomic_size_is_only_far_away():
    configs.write(70, "kv_write", GEOMETRY, bucket(10**320, block=4))
    configs.write(70, "kv_write", GEOMETRY, bucket(32, block=8))
    assert registry.resolve(OP, GEOMETRY, 70).plan.block_t == 8


def test_what_this_process_writes_is_read_again():
    assert not list(configs.lookup(70, "kv_write", GEOMETRY))
    configs.write(70, "kv_write", GEOMETRY, bucket())
    assert [b for _, _, b in configs.lookup(70, "kv_write", GEOMETRY)] == [bucket()]


def test_a_writer_waits_for_the_lock():
    file = configs.path(configs.user_root(), 70, "kv_write", GEOMETRY)
    file.parent.mkdir(parents=True)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with filelock.FileLock(f"{file}.lock"):
            writing = pool.submit(configs.write, 70, "kv_write", GEOMETRY, bucket())
            time.sleep(0.3)
            assert not writing.done() and not file.exists()
        assert writing.result(timeout=30) == file and file.exists()


def test_a_file_under_a_wrong_name_is_not_added_to():
    """A copy for another shape would otherwise lend its plans to this one as soon as a bucket is written."""
    other = msgspec.structs.replace(GEOMETRY, head_dim=64)
    file = configs.write(70, "kv_write", GEOMETRY, bucket())
    copy = configs.path(configs.user_root(), 70, "kv_write", other)
    copy.write_bytes(file.read_bytes())
    assert configs.write(70, "kv_write", other, bucket(8)) == copy
    assert configs.decode(copy).buckets == [bucket(8)]
    assert len(list(file.parent.glob("*.corrupt-*"))) == 1


def test_a_reader_that_met_a_bad_file_does_not_move_its_replacement(monkeypatch):
    file = configs.write(70, "kv_write", GEOMETRY, bucket())
    good = file.read_bytes()
    file.write_text("{")
    decode = configs.decode

    def replaced_meanwhile(path):
        try:
            return decode(path)
        finally:
            path.write_bytes(good)

    monkeypatch.setattr(configs, "decode", replaced_meanwhile)
    assert registry.resolve(OP, GEOMETRY, 70).source == "user"
    assert file.read_bytes() == good and not list(file.parent.glob("*.corrupt-*"))


@pytest.mark.parametrize("make", [lambda root, file: root.write_text(""), lambda root, file: file.mkdir(parents=True)], ids=["root_is_a_file", "file_is_a_folder"])
def test_an_unreadable_cache_is_reported_and_the_default_serves(make, caplog):
    root = configs.user_root()
    root.parent.mkdir(parents=True)
    make(root, configs.path(root, 70, "kv_write", GEOMETRY))
    assert registry.resolve(OP, GEOMETRY, 70).source == "default"
    assert "cannot be read" in caplog.text


def test_a_bad_file_in_a_cache_that_cannot_be_written_is_passed_over(monkeypatch, caplog):
    file = configs.write(70, "kv_write", GEOMETRY, bucket())
    file.write_text("{")

    def read_only(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(configs.os, "replace", read_only)
    assert registry.resolve(OP, GEOMETRY, 70).source == "default"
    assert file.read_text() == "{" and "moving it aside failed" in caplog.text


def test_a_symbolic_link_serves(tmp_path):
    file = configs.write(70, "kv_write", GEOMETRY, bucket())
    real = file.rename(tmp_path / "real.json")
    file.symlink_to(real)
    assert registry.resolve(OP, GEOMETRY, 70).source == "user"


def _write_one(arguments):
    root, tokens = arguments
    configs.write(70, "kv_write", GEOMETRY, bucket(tokens), root=Path(root))


def test_concurrent_writers_lose_nothing(tmp_path):
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        pool.map(_write_one, [(str(tmp_path), 2**i) for i in range(12)])
    file = configs.path(tmp_path, 70, "kv_write", GEOMETRY)
    assert sorted(b.at["tokens"] for b in configs.decode(file).buckets) == [2**i for i in range(12)]


def _write_many(root, first, report):
    for tokens in range(first, first + 1000):
        configs.write(70, "kv_write", GEOMETRY, bucket(tokens), root=Path(root))
        report.send(tokens)


def test_a_writer_that_is_killed_loses_nothing_that_it_reported(tmp_path):
    context = multiprocessing.get_context("spawn")
    written = set()
    for first in (1, 10_001):
        receive, send = context.Pipe(duplex=False)
        writer = context.Process(target=_write_many, args=(str(tmp_path), first, send))
        writer.start()
        for _ in range(10):
            written.add(receive.recv())
        writer.kill()
        writer.join()
        while receive.poll():
            written.add(receive.recv())
    kept = {b.at["tokens"] for b in configs.decode(configs.path(tmp_path, 70, "kv_write", GEOMETRY)).buckets}
    assert written <= kept and len(written) >= 20
    configs.write(70, "kv_write", GEOMETRY, bucket(5000), root=tmp_path)  # the lock did not stay behind


SHIPPED = sorted((configs.shipped_root() or Path("/nonexistent")).rglob("*.json"))


def test_configs_are_shipped():
    assert SHIPPED


@pytest.mark.parametrize("file", SHIPPED, ids=lambda f: str(f.relative_to(configs.shipped_root())))
def test_every_shipped_plan_is_served(file):
    """Right place, right revision, feasible, and labelled: only the model, or a card of that very compute capability."""
    config = configs.decode(file)
    op = registry.get(config.op)
    assert config.buckets
    for entry in config.buckets:
        shape = op.geometry.from_keys({**config.static, **entry.at})
        arch = int(config.arch.removeprefix("sm"))
        assert configs.path(configs.shipped_root(), arch, config.op, shape) == file
        route = registry.resolve(op, shape, arch)
        assert (route.source, route.file, route.impl.name) == ("shipped", str(file), entry.impl)
        assert msgspec.to_builtins(route.plan) == entry.plan
        if isinstance(entry.evidence, configs.Measured):
            assert "V100" in entry.evidence.device or arch != 70
