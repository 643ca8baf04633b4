"""The command line: JSON contracts, exit codes, clear refusals. Each call is a process, as a user makes it."""
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from support import ROOT, cli
from typer.testing import CliRunner

from sm70_triton import aot, probe, registry
from sm70_triton import cli as command_line

ATTENTION = {"q_heads": 24, "kv_heads": 4, "head_dim": 256, "batch": 2, "q_len": 512, "kv_len": 4096, "kv_dtype": "e4m3", "page_size": 784,
             "causal": True, "window": 1024, "softcap": 30.0, "sinks": True, "alibi": False}  # fmt: skip
GEMM = {"M": 16, "N": 6144, "K": 4096, "format": "nvfp4", "group": 16, "act_dtype": "bf16", "gated": False}


def test_ops_lists_the_registry():
    code, rows, _ = cli("ops")
    assert code == 0
    assert [row["op"] for row in rows] == sorted(registry.discover())
    for row in rows:
        assert set(row) == {"op", "cases", "impls"} and row["cases"]
        for impl in row["impls"]:
            assert set(impl) == {"name", "rev", "min_arch", "arithmetic"} and impl["arithmetic"]
        assert {"simt", "torch"} <= {impl["name"] for impl in row["impls"]}


@pytest.mark.parametrize("op", sorted(registry.discover()))
@pytest.mark.parametrize("full", [False, True], ids=["defaults", "every_key"])
def test_explain_contract(op, full):
    keys = {"w4": GEMM, "w8": GEMM | {"format": "fp8_block", "group": 128}}.get(op.removeprefix("gemm_")[:2], ATTENTION) if full else {}
    code, route, _ = cli("explain", op, "--arch", "sm70", "--geometry", json.dumps(keys))
    assert code == 0, route
    assert set(route) == {"impl", "plan", "source", "file", "refused"}
    assert route["impl"] == "simt"
    assert all(set(item) == {"impl", "reason"} and item["reason"] for item in route["refused"])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["explain", "attn"], "op 'attn' does not exist; accepted: attn_decode"),
        (["explain", "kv_write", "--geometry", "{"], "is not JSON"),
        (["explain", "kv_write", "--geometry", "[1]"], "a JSON object is expected"),
        (["explain", "kv_write", "--geometry", '{"heads": 4}'], "geometry key 'heads' is not known; accepted: "),
        (["explain", "attn_decode", "--geometry", '{"q_heads": 7, "kv_heads": 2}'], "q_heads"),
        (["explain", "attn_decode", "--geometry", '{"head_dim": "wide"}'], "head_dim"),
        (["explain", "gemm_w4a16", "--geometry", '{"format": "awq", "group": 100, "K": 4096}'], "group"),
        (["explain", "gemm_w4a16", "--geometry", '{"format": "int3"}'], "format"),
        (["explain", "kv_write", "--arch", "volta"], "arch 'volta' is not understood"),
        (["warmup", "--target", "sm70", "--geometry", "{}"], "--geometry needs the op"),
        (["warmup", "--target", "sm70", "--model", "/no/such/model"], "does not exist"),
        (["warmup", "--target", "sm70", "--tp", "2"], "--tp 2 needs the --model"),
        (["warmup", "--target", "cpu"], "nothing is compiled for a CPU"),
        (["warmup", "--jobs", "0"], "--jobs"),
        (["explain"], "Missing argument"),
        (["explain", "kv_write", "--geomtry", "{}"], "--geomtry"),
        (["explian", "kv_write"], "explian"),
        (["explain", "kv_write", "--arch", ""], "arch '' is not understood"),
        (["explain", "kv_write", "--arch", "sm00"], "arch 'sm00' is not understood"),
        (["explain", "[/red]"], "op '[/red]' does not exist"),
        (["explain", b"\xff"], "does not exist"),
        (["explain", "kv_write", "--geometry", "[" * 20_000], "is not JSON"),
        (["explain", "kv_write", "--geometry", '{"tokens": ' + "9" * 5000 + "}"], "is not JSON"),
        (["demo", "--quant", "int3"], "int3"),
        (["demo", "--max-tokens", "0"], "--max-tokens"),
        (["demo", "--prompt", b"\xff"], "--prompt '\\udcff' is not UTF-8"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(arguments, message):
    code, report, stderr = cli(*arguments)
    assert code == 2
    assert set(report) == {"error"} and message in report["error"] and "Traceback" not in stderr


@pytest.mark.parametrize("command, name, value", [("doctor", "SM70_TRITON_DEBUG", "maybe"), ("ops", "SM70_TRITON_IMPLS", "x")])
def test_a_wrong_variable_is_refused_by_every_command(command, name, value):
    code, report, stderr = cli(command, env={name: value})
    assert code == 2 and name in report["error"] and "Traceback" not in stderr


KEYS = [*ATTENTION, *GEMM, "tokens", "perm", "codec"]
VALUES = [
    "0", "-1", "3", "1e3", "1.5", "true", "null", '""', '"../x"', '"\\ud800"', '"[/red]"', "[]", "[1]", "{}", "NaN", "-Infinity", "1e400", "9" * 26, "9" * 500,
    '"silu"', '"fp16"', '"e4m3"', '"awq"', '"int8"',
]  # fmt: skip


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "text"])
@pytest.mark.parametrize("op", sorted(registry.discover()))
def test_no_value_of_any_key_escapes(op, as_json):
    """In this process, for speed: the answer is a route, or an error that names the key or the value."""
    for key in KEYS:
        for value in VALUES:
            arguments = ["explain", op, "--arch", "sm70", "--geometry", f'{{"{key}": {value}}}', *(["--json"] if as_json else [])]
            done = CliRunner().invoke(command_line.app, arguments)
            assert done.exception is None or isinstance(done.exception, SystemExit), (key, value, repr(done.exception))
            assert done.exit_code in (0, 2), (key, value)
            if as_json:
                report = json.loads(done.stdout)
                assert "impl" in report if done.exit_code == 0 else key in report["error"] or "tokens" in report["error"], (key, value, report)


@pytest.mark.parametrize("keys", [{"head_dim": 0}, {"kv_heads": -1}, {"page_size": 0}, {"tokens": -1}, {"batch": -1}, {"kv_dtype": "fp8"}, {"kv_dtype": "../x"}])
def test_kv_write_takes_only_what_exists(keys):
    with pytest.raises(ValueError, match=next(iter(keys))):
        registry.get("kv_write").geometry.from_keys(keys)


def text(*args, **variables):
    """Like `cli`, without --json and with the narrowest of terminals: (code, standard output, standard error)."""
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"COLUMNS": "20"} | variables
    done = subprocess.run([sys.executable, "-m", "sm70_triton", *args], capture_output=True, text=True, env=clean, cwd=ROOT)
    return done.returncode, done.stdout, done.stderr


def test_lines_are_whole_and_brackets_stay(tmp_path):
    fake = tmp_path / "ptxas"
    fake.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo 'Cuda compilation tools, release 13.0, V13.0.88' && exit 0\nexit 255\n")
    fake.chmod(0o755)
    code, stdout, _ = text("doctor", TRITON_PTXAS_PATH=str(fake))
    assert code == 1
    assert any(line.startswith("fix: ptxas 13.0.88") and "pip install 'triton>=3.6,<4'" in line for line in stdout.splitlines())
    code, stdout, _ = text("explain", "gemm_w4a16", "--arch", "sm70", "--geometry", json.dumps(GEMM))
    assert code == 0
    assert any("geometry {" in line and line.endswith("}") for line in stdout.splitlines())
    assert any("refused  torch: it is the reference; only override() or SM70_TRITON_IMPL take it on a GPU" in line for line in stdout.splitlines())
    code, _, stderr = text("explain", "[cuda] [/red]")
    assert code == 2 and stderr.startswith("error: op '[cuda] [/red]' does not exist; accepted: ") and len(stderr.splitlines()) == 1


def test_doctor_keeps_the_extra_in_its_advice(monkeypatch):
    fix = "pip install 'sm70-triton[cuda]'"
    report = {**probe.doctor(), "cupy": None, "ok": False, "fix": [fix]}
    monkeypatch.setattr(probe, "doctor", lambda: report)
    done = CliRunner().invoke(command_line.app, ["doctor"])
    assert done.exit_code == 1 and done.stdout.count(fix) == 2


def test_ascii_terminal_and_json_in_utf8():
    code, _, stderr = text("explain", "op\u00e9", PYTHONIOENCODING="ascii")
    assert code == 2 and "Traceback" not in stderr
    code, report, _ = cli("explain", "op\u00e9", env={"PYTHONIOENCODING": "ascii"})
    assert code == 2 and "op\u00e9" in report["error"]


def test_the_demo_without_its_packages_says_what_to_install(tmp_path):
    (tmp_path / "gguf.py").write_text("raise ModuleNotFoundError(\"No module named 'gguf'\")")
    code, report, stderr = cli("demo", env={"PYTHONPATH": str(tmp_path)})
    assert code == 1 and "pip install 'sm70-triton[demo]'" in report["error"] and "sm70-triton[demo]" in stderr and "Traceback" not in stderr


def test_the_answer_of_the_model_is_not_markup(monkeypatch):
    pytest.importorskip("gguf")
    from sm70_triton import demo

    class Result:
        text = "[INST] a[0] [/INST] [bold]"

        def summary(self):
            return "[dim]"

    monkeypatch.setattr(demo, "run_demo", lambda *args, **kwargs: Result())
    done = CliRunner().invoke(command_line.app, ["demo"])
    assert done.exit_code == 0 and done.stdout.splitlines() == ["[INST] a[0] [/INST] [bold]", "[dim]"]


def test_no_implementation_is_exit_code_1():
    code, report, _ = cli("explain", "kv_write", "--arch", "sm61")
    assert code == 1 and "no implementation of kv_write" in report["error"] and "needs sm70" in report["error"]


def test_doctor_contract():
    code, report, _ = cli("doctor")
    assert set(report) == {"ok", "torch", "triton", "nvrtc", "cupy", "vllm", "gpus", "fix"}
    assert report["torch"]["version"] and isinstance(report["torch"]["arch_list"], list)
    assert report["triton"]["sm70"] is True and report["triton"]["ptxas"].startswith("12.")
    assert code == (0 if report["ok"] else 1) and report["ok"] == (not report["fix"])


def test_doctor_on_cuda_13_says_what_is_gone_and_what_to_install(tmp_path):
    """A ptxas that answers as CUDA 13's does."""
    fake = tmp_path / "ptxas"
    fake.write_text(
        "#!/bin/sh\nif [ \"$1\" = --version ]; then echo 'Cuda compilation tools, release 13.0, V13.0.88'; exit 0; fi\n"
        "echo \"ptxas fatal   : Value 'sm_70' is not defined for option 'gpu-name'\" >&2; exit 255\n"
    )
    fake.chmod(0o755)
    code, report, _ = cli("doctor", env={"TRITON_PTXAS_PATH": str(fake)})
    assert code == 1 and not report["ok"] and report["triton"]["sm70"] is False and report["triton"]["ptxas"] == "13.0.88"
    assert any("sm_70" in line and "CUDA 13" in line and "pip install" in line for line in report["fix"])


def test_torch_without_volta_is_reported(monkeypatch):
    monkeypatch.setattr(probe, "_compiled_arch_list", lambda: ["sm_75", "sm_90"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    report = probe.doctor()
    assert not report["ok"] and any("no sm_70 code" in line and "torch==2.10.0" in line for line in report["fix"])


def test_warmup_compiles_one_geometry():
    code, report, _ = cli("warmup", "kv_write", "--target", "sm70", "--geometry", '{"head_dim": 96, "kv_dtype": "e5m2", "tokens": 9}')
    assert code == 0 and report["target"] == "sm70" and report["failed"] == 0 and report["compiled"] == 1
    (item,) = report["items"]
    assert item["kernels"][0]["registers"] > 0


def test_warmup_names_the_reason_when_nothing_can_be_compiled():
    code, report, _ = cli("warmup", "kv_write", "--target", "sm61")
    assert code == 1 and "kv_write simt: it needs sm70 or later, this is sm61" in report["error"]


def test_warmup_reports_a_compiler_that_fails(tmp_path):
    """Triton prints the refused PTX; standard output must stay one JSON document."""
    fake = tmp_path / "ptxas"
    fake.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo 'Cuda compilation tools, release 13.0, V13.0.88' && exit 0\necho sm_70 is gone >&2\nexit 255\n")
    fake.chmod(0o755)
    variables = {"TRITON_PTXAS_PATH": str(fake), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    code, report, _ = cli("warmup", "kv_write", "--target", "sm70", "--geometry", "{}", env=variables)
    assert code == 1 and (report["compiled"], report["failed"]) == (0, 1)
    assert "AotError" in report["items"][0]["error"] and "sm_70 is gone" in report["items"][0]["error"]


def test_warmup_ends_on_ctrl_c(tmp_path):
    command = [sys.executable, "-m", "sm70_triton", "warmup", "attn_decode", "attn_prefill", "--target", "sm70", "--json"]
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=clean, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not any(tmp_path.iterdir()) and time.monotonic() < deadline:  # the first kernel is being compiled
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)  # a terminal signals the whole group
        stdout, stderr = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130 and "Traceback" not in stderr
    assert "interrupted" in json.loads(stdout)["error"]


def test_warmup_survives_a_worker_that_dies(monkeypatch):
    class Broken:
        def __init__(self, *args, **kwargs):
            pass

        def submit(self, *args):
            future = command_line.concurrent.futures.Future()
            future.set_exception(command_line.concurrent.futures.process.BrokenProcessPool("gone"))
            return future

        def shutdown(self, **kwargs):
            pass

    monkeypatch.setattr(command_line.concurrent.futures, "ProcessPoolExecutor", Broken)
    monkeypatch.setattr(probe, "interpreting", lambda: False)
    done = CliRunner().invoke(command_line.app, ["warmup", "kv_write", "--target", "sm70", "--geometry", "{}", "--json"])
    assert done.exit_code == 1 and "a compiling process died" in json.loads(done.stdout)["items"][0]["error"]


def test_usage_without_the_disassembler_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr("triton.__file__", str(tmp_path / "__init__.py"))
    launch = aot.Launch(name="k", grid=(1, 1, 1), num_warps=1, shared_bytes=0, ptx="", cubin=b"", params=())
    with pytest.raises(aot.AotError, match=r"k compiled, but Triton's cuobjdump is not at .*reinstall triton"):
        aot.usage(launch)


def test_warmup_without_a_gpu_needs_a_target():
    code, report, _ = cli("warmup", env={"CUDA_VISIBLE_DEVICES": ""})
    assert code == 2 and "--target sm70" in report["error"]


def test_warmup_of_a_model(tmp_path):
    config = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "max_position_embeddings": 8192,
              "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, report, _ = cli("warmup", "kv_write", "gemm_w4a16", "--target", "sm70", "--model", str(tmp_path), "--tp", "3")
    assert code == 0 and report["failed"] == 0
    assert {item["op"] for item in report["items"]} == {"kv_write", "gemm_w4a16"}
    assert any("'N': 320, 'K': 576" in item["case"] for item in report["items"])  # (3 + 2) heads of 64
