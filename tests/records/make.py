"""Run every op on a GPU and write one JSON record: native against float64, graph replay, and the sm_70 PTX through the driver.

    python tests/records/make.py --commit $(git rev-parse HEAD) --out record.json [--model SmolLM2.gguf]

Times nothing: these records are about right and wrong. `render.py` turns them into the README's tables.
"""
from __future__ import annotations

import argparse
import datetime
import json
import re
import secrets
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from support import capture_and_replay

from fallback_cuda import module
from sm70_triton import aot, probe, registry, verify

SCALARS = {"i1": np.bool_, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64, "u32": np.uint32, "u64": np.uint64, "fp32": np.float32, "fp64": np.float64}


def run_ptx(launch: aot.Launch) -> None:
    """Launch a recorded kernel's sm_70 PTX on the card that is here."""
    args = [np.uint64(v.data_ptr()) if t.startswith("*") else SCALARS[t](v) for t, v in launch.params]
    declared = len(re.findall(r"^\s*\.param ", launch.ptx[: launch.ptx.index("\n{")], re.M))
    args += [np.uint64(0)] * (declared - len(args))  # Triton's scratch pointers, unused by kernels that ask for none
    torch.cuda.synchronize()
    function = module.load_ptx(launch.ptx, launch.name)
    if launch.shared_bytes > 48 * 1024:
        function.max_dynamic_shared_size_bytes = launch.shared_bytes
    function(launch.grid, (32 * launch.num_warps,), tuple(args), shared_mem=launch.shared_bytes)
    torch.cuda.synchronize()


def native(op: Any, impl: Any, seed: int, arch: int) -> dict[str, Any]:
    row = {"op": op.name, "impl": impl.name, "rev": impl.rev, "seed": seed, "cases": 0, "passed": 0, "worst_error_over_bound": 0.0, "worst_relative_l2": 0.0, "failed": []}
    for case in op.cases:
        if registry.refusal(impl, case.geometry, arch) is not None:
            continue
        started = time.time()
        row["cases"] += 1
        try:
            check = verify.run_case(op, case, impl=impl.name, device="cuda", seed=seed)
        except Exception as error:
            row["failed"].append({"case": case.name, "detail": f"{type(error).__name__}: {error}"[:300]})
            continue
        row["passed"] += check.ok
        if not check.ok:
            row["failed"].append({"case": case.name, "detail": check.detail})
        else:
            row["worst_error_over_bound"] = max(row["worst_error_over_bound"], check.worst)
            row["worst_relative_l2"] = max(row["worst_relative_l2"], check.relative_l2)
        if time.time() - started > 10:
            print(f"slow: {op.name} {case.name} {time.time() - started:.1f} s", flush=True)
    return row


def replay(op: Any, seed: int) -> dict[str, Any]:
    row: dict[str, Any] = {"op": op.name, "impl": "simt", "cases": 0, "passed": 0, "failed": []}
    for case in op.cases:
        checks = [] if case.production else capture_and_replay(op, case, "simt", seed)
        row["cases"] += bool(checks)
        row["passed"] += bool(checks) and all(check.ok for check in checks)
        row["failed"] += [{"case": case.name, "detail": check.detail} for check in checks if not check.ok]
    return row


def ptx(op: Any, impl: Any, seed: int) -> list[dict[str, Any]]:
    rows = []
    for case in op.cases:
        if case.production or not case.geometry or registry.refusal(impl, case.geometry, 70) is not None:
            continue
        inputs = op.make_inputs(case.geometry, seed=seed, device="cuda", **case.options)
        alone = verify.clone(inputs)
        expected = op.reference(**verify.clone(inputs))
        with aot.target(70) as launches, registry.override(op.name, impl.name):
            op.call(**inputs)
        if not launches:
            continue
        for launch in launches:
            run_ptx(launch)
        check = verify.compare(op, inputs, expected)
        with registry.override(op.name, impl.name):
            op.call(**alone)
        same = all(torch.equal(inputs[n].contiguous().view(torch.uint8), alone[n].contiguous().view(torch.uint8)) for n in op.outputs if isinstance(inputs.get(n), torch.Tensor))
        rows.append({"op": op.name, "impl": impl.name, "case": case.name, "kernels": len(launches), "ok": check.ok, "worst_error_over_bound": check.worst,
                     "bits_equal_native": same, "detail": "" if check.ok else check.detail})  # fmt: skip
    return rows


def demo(model: str) -> list[dict[str, Any]]:
    from sm70_triton.demo import run_demo

    rows = []
    reference = json.loads((Path(__file__).parents[1] / "data/smollm2_reference.json").read_text())
    for quant, kv in (("fp16", "fp16"), ("fp16", "e4m3"), ("fp8", "fp16"), ("nvfp4", "fp16"), ("awq", "fp16"), ("awq", "e4m3")):
        registry.clear()  # so that `implementations` speaks of this run alone
        result = run_demo(prompt="What is the capital of France?", quant=quant, kv=kv, device="cuda", max_tokens=64, model_path=model, perplexity=True)
        rows.append({"quant": quant, "kv": kv, "equals_reference": result.tokens == reference[0]["out_ids"], "text": result.text, "tokens": result.tokens, "perplexity": result.perplexity,
                     "perplexity_fp16": result.perplexity_fp16, "implementations": result.implementations})  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--model")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed")
    arch = probe.arch_of(torch.device("cuda", 0))
    seed = secrets.randbits(31)
    properties = torch.cuda.get_device_properties(0)
    record: dict[str, Any] = {
        "device": properties.name, "arch": probe.arch_name(arch), "torch": str(torch.__version__), "triton": __import__("triton").__version__,
        "driver": Path("/sys/module/nvidia/version").read_text().strip() if Path("/sys/module/nvidia/version").exists() else "unknown", "commit": options.commit,
        "command": "python tests/records/make.py --commit COMMIT --out OUT" + (" --model GGUF" if options.model else ""),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"), "seed": seed,
    }  # fmt: skip
    ops = sorted(registry.discover().values(), key=lambda op: op.name)
    record["native"] = [native(op, impl, seed, arch) for op in ops for impl in op.impls.values()]
    print(json.dumps(record["native"], indent=1), flush=True)
    record["graph_replay"] = [replay(op, seed) for op in ops]
    print(json.dumps(record["graph_replay"], indent=1), flush=True)
    record["sm70_ptx"] = [row for op in ops for impl in op.impls.values() if "triton" in impl.needs.packages for row in ptx(op, impl, seed)]
    print(json.dumps([r for r in record["sm70_ptx"] if not r["ok"]], indent=1), flush=True)
    if options.model:
        record["demo"] = demo(options.model)
    Path(options.out).write_text(json.dumps(record, indent=1) + "\n")
    bad = [r for part in ("native", "graph_replay") for r in record[part] if r["failed"]] + [r for r in record["sm70_ptx"] if not r["ok"]]
    print(f"{len(bad)} rows with failures")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
