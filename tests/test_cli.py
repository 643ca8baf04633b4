"""The command line: JSON contracts, exit codes, clear refusals. Each call is a process, as a user makes it."""
import json

import pytest
from support import cli

from sm70_triton import probe, registry

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
    ],
)
def test_nonsense_is_refused_in_one_sentence(arguments, message):
    code, report, stderr = cli(*arguments)
    assert code == 2
    assert set(report) == {"error"} and message in report["error"] and "Traceback" not in stderr


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
