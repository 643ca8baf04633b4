"""Which implementation serves a call, and with which plan: `op()`, `impl()`, `resolve()`, `override()`.

`resolve` is a pure, cached lookup over host integers. It never benchmarks, never touches a tensor and never synchronises, so
it is safe during CUDA-graph capture. Precedence: `override()` > `SM70_TRITON_IMPL` > `SM70_TRITON_CONFIG_DIR` > user cache >
shipped config > the implementation's default plan. A forced implementation is served or refused, never replaced.
"""
from __future__ import annotations

import contextvars
import importlib
import logging
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from . import configs, env, probe
from .types import FULL_PRECISION, Arithmetic, Case, Geometry, Impl, Needs, Op, Plan, Refusal, ResolveError, Route, Work

log = logging.getLogger("sm70_triton")

OPS: dict[str, Op] = {}
_LIBRARY: Any = None
F = TypeVar("F", bound=Callable[..., Any])


def op(
    name: str,
    *,
    geometry: type[Geometry],
    schema: str,
    outputs: Sequence[str],
    call: Callable[..., Any],
    run: Callable[..., None],
    reference: Callable[..., dict[str, Any]],
    cases: Sequence[Case],
    make_inputs: Callable[..., dict[str, Any]],
    tolerance: Callable[..., dict[str, Any]],
    work: Callable[[Any], Work],
) -> Op:
    """Declare an operation and register it with `torch.library` as `torch.ops.sm70_triton.<name>`.

    * `schema`: out-mutating, returns nothing: `(Tensor q, ..., Tensor(a!) out) -> ()`.
    * `outputs`: names of the arguments that are written.
    * `call`: the public function. `run`: same arguments as the schema; validates, makes the geometry, resolves, launches.
    * `reference(**inputs)`: {output name: float64 or exact tensor}; the specification; writes nothing.
    * `make_inputs(geometry, *, seed, device, **case.options)`: keyword arguments of `call`, outputs poisoned.
    * `tolerance(inputs, expected)`: {output name: elementwise absolute bound, or None for bit equality}.
    """
    if name in OPS:
        raise ValueError(f"op {name!r} is already registered")
    declared = Op(
        name=name, geometry=geometry, schema=schema, outputs=tuple(outputs), call=call, run=run, reference=reference,
        cases=tuple(cases), make_inputs=make_inputs, tolerance=tolerance, work=work,
    )
    OPS[name] = declared
    _register_torch(declared)
    return declared


def _register_torch(declared: Op) -> None:
    import torch

    global _LIBRARY
    if _LIBRARY is None:
        _LIBRARY = torch.library.Library("sm70_triton", "DEF")
    _LIBRARY.define(declared.name + declared.schema, tags=(torch.Tag.needs_fixed_stride_order,))
    _LIBRARY.impl(declared.name, declared.run, "CPU")
    _LIBRARY.impl(declared.name, declared.run, "CUDA")
    # Every op only writes into its arguments, so there is nothing for a fake tensor to compute.
    torch.library.register_fake(f"sm70_triton::{declared.name}", lambda *args, **kwargs: None, lib=_LIBRARY)


def _always(*_: Any) -> None:
    return None


def impl(
    declared: Op,
    name: str,
    *,
    rev: int,
    needs: Needs,
    arithmetic: Arithmetic,
    plan: type[Plan],
    default: Callable[[Any, int], Plan],
    candidates: Callable[[Any, int], Iterable[Plan]],
    supports: Callable[[Any, int], str | None] = _always,
    feasible: Callable[[Any, Any, int], str | None] = _always,
    priority: int = 0,
    automatic: bool = True,
) -> Callable[[F], F]:
    """Register the decorated launcher as implementation `name` of an op. Bump `rev` whenever stored plans stop being valid."""

    def decorate(launch: F) -> F:
        if name in declared.impls:
            raise ValueError(f"{declared.name} already has an implementation {name!r}")
        for key in [key for key in _routes if key[0] == declared.name]:
            del _routes[key]  # decided without it
        declared.impls[name] = Impl(
            op=declared.name, name=name, rev=rev, needs=needs, arithmetic=arithmetic, plan=plan, launch=launch, supports=supports,
            feasible=feasible, default=default, candidates=candidates, priority=priority, automatic=automatic,
        )
        return launch

    return decorate


def discover() -> dict[str, Op]:
    """Import every op file and return the registry."""
    ops = importlib.import_module(f"{__package__}.ops")  # by name: found at run time, never a dependency of this module
    for module in pkgutil.iter_modules(ops.__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"{ops.__name__}.{module.name}")
    return OPS


def get(name: str) -> Op:
    found = discover()
    if name not in found:
        raise ValueError(f"op {name!r} does not exist; accepted: {', '.join(sorted(found))}")
    return found[name]


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What `override` asks for; a None leaves that part to the ordinary lookup."""

    impl: str | None = None
    plan: Plan | None = None
    require: Arithmetic = FULL_PRECISION


_overrides: contextvars.ContextVar[tuple[tuple[str, Choice], ...]] = contextvars.ContextVar("sm70_triton_overrides", default=())


@contextmanager
def override(op_name: str, impl: str | None = None, *, plan: Plan | None = None, require: Arithmetic = FULL_PRECISION) -> Iterator[None]:
    """Inside the block, `op_name` is served by `impl` with `plan`, under the admission rule `require`. Never falls back.

    Holds for this thread and this asyncio task; of nested blocks for one op the innermost alone counts. Raises ValueError, TypeError.
    """
    declared = get(op_name)
    if not isinstance(require, Arithmetic):
        raise TypeError(f"require={require!r}; a sm70_triton.types.Arithmetic is accepted")
    if impl is not None and impl not in declared.impls:
        raise ValueError(f"impl={impl!r} is not an implementation of {op_name}; accepted: {', '.join(declared.impls)}")
    if plan is not None:
        owners = [i.name for i in declared.impls.values() if isinstance(plan, i.plan)]
        if impl is None or impl not in owners:
            raise ValueError(f"plan={plan!r} belongs to {owners or 'no implementation'} of {op_name}; name that one as impl")
    token = _overrides.set((*_overrides.get(), (op_name, Choice(impl=impl, plan=plan, require=require))))
    try:
        yield
    finally:
        _overrides.reset(token)


_routes: dict[tuple[str, Geometry, int, Choice | None, env.Env], Route] = {}
_MOST_ROUTES = 1 << 15  # lengths change with every token; a server runs for months
_said: set[str] = set()


def resolve(declared: Op, geometry: Geometry, arch: int) -> Route:
    """The implementation and plan for a geometry on a compute capability (x 10; 0 is a CPU). Raises ResolveError.

    Cached until `clear()`: a config written by another process is seen by the next process, not by this one.
    """
    choice = None
    for name, asked in reversed(_overrides.get()):
        if name == declared.name:
            choice = asked
            break
    key = (declared.name, geometry, arch, choice, env.get())
    route = _routes.get(key)
    if route is None:
        route = _resolve(declared, geometry, arch, choice)
        if len(_routes) >= _MOST_ROUTES:
            _routes.clear()
        _routes[key] = route
        _report(declared, geometry, arch, route)
    return route


def launch(route: Route, geometry: Geometry, device: Any, **tensors: Any) -> None:
    """Run a route on the tensors' own device, which need not be the current one (Triton launches on the current one)."""
    if device.type == "cuda" and device.index is not None:
        import torch

        if device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return route.impl.launch(route.plan, geometry, **tensors)
    return route.impl.launch(route.plan, geometry, **tensors)


def clear() -> None:
    """Forget every cached route and config file (after another process wrote configs)."""
    _routes.clear()
    _said.clear()
    configs.clear()


def served() -> dict[str, dict[str, int]]:
    """{op: {implementation: number of distinct geometries it was resolved for}} in this process, of the routes in the cache."""
    counts: dict[str, dict[str, int]] = {}
    for (name, *_), route in list(_routes.items()):  # other threads add to it
        per_op = counts.setdefault(name, {})
        per_op[route.impl.name] = per_op.get(route.impl.name, 0) + 1
    return counts


def refusal(candidate: Impl, geometry: Geometry, arch: int, require: Arithmetic = FULL_PRECISION) -> str | None:
    """Why an implementation cannot serve a geometry at all, whatever the plan; None if it can."""
    needs = candidate.needs
    if arch == 0 and needs.min_arch > 0 and not probe.interpreting():
        return "it needs a GPU, or Triton's interpreter (TRITON_INTERPRET=1)"
    if 0 < arch < needs.min_arch:
        return f"it needs {probe.arch_name(needs.min_arch)} or later, this is {probe.arch_name(arch)}"
    if needs.max_arch is not None and arch > needs.max_arch:
        return f"it is for {probe.arch_name(needs.max_arch)} or earlier, this is {probe.arch_name(arch)}"
    return probe.missing(needs.packages) or candidate.arithmetic.refusal(require) or candidate.supports(geometry, arch)


def _resolve(declared: Op, geometry: Geometry, arch: int, choice: Choice | None) -> Route:
    require = choice.require if choice else FULL_PRECISION
    for name in env.get().impl:
        if name not in OPS and name not in discover():  # an op file may not have been imported yet
            raise ResolveError(f"SM70_TRITON_IMPL names the op {name!r}, which does not exist; accepted: {', '.join(sorted(OPS))}")
    forced, source = (choice.impl, "override") if choice and choice.impl else (env.get().impl.get(declared.name), "env")
    if forced is not None and forced not in declared.impls:
        raise ResolveError(f"SM70_TRITON_IMPL names {forced!r}, which {declared.name} does not have; accepted: {', '.join(declared.impls)}")

    refused: list[Refusal] = []
    usable: list[Impl] = []
    for candidate in sorted(declared.impls.values(), key=lambda c: -c.priority):
        reason = refusal(candidate, geometry, arch, require)
        if reason is None and forced is not None and candidate.name != forced:
            reason = f"{forced} was asked for ({'override()' if source == 'override' else 'SM70_TRITON_IMPL'})"
        elif reason is None and forced is None and arch > 0 and not candidate.automatic:
            reason = "it is the reference; only override() or SM70_TRITON_IMPL take it on a GPU"
        elif reason is None and forced is None and arch == 0 and candidate.needs.min_arch > 0:
            reason = "a GPU kernel runs in the interpreter only by override() or SM70_TRITON_IMPL"
        if reason is None:
            usable.append(candidate)
        else:
            refused.append(Refusal(candidate.name, reason))

    def route(candidate: Impl, plan: Plan, why: str, file: str | None) -> Route:
        passed_over = [Refusal(c.name, f"{candidate.name} is preferred ({why})") for c in usable if c is not candidate]
        return Route(impl=candidate, plan=plan, source=why, file=file, refused=(*refused, *passed_over))

    if choice is not None and choice.plan is not None:
        for candidate in usable:
            reason = candidate.feasible(choice.plan, geometry, arch)
            if reason is None:
                return route(candidate, choice.plan, "override", None)
            refused.append(Refusal(candidate.name, f"plan {choice.plan!r}: {reason}"))
        usable = []

    by_name = {candidate.name: candidate for candidate in usable}
    for found_in, file, bucket in configs.lookup(arch, declared.name, geometry) if usable else ():
        candidate = by_name.get(bucket.impl)
        if candidate is None:
            continue  # refused above, and listed with its reason
        if bucket.rev != candidate.rev:
            _warn_once(f"{file}: a plan of {bucket.impl} rev {bucket.rev} is ignored, this version has rev {candidate.rev}")
            continue
        try:
            plan = msgspec.convert(bucket.plan, candidate.plan)
        except msgspec.ValidationError as error:
            _warn_once(f"{file}: a plan of {bucket.impl} is ignored: {error}")
            continue
        reason = candidate.feasible(plan, geometry, arch)
        if reason is not None:
            _warn_once(f"{file}: plan {plan!r} of {bucket.impl} is ignored: {reason}")
            continue
        return route(candidate, plan, source if forced else found_in, str(file))

    for candidate in usable:
        plan = candidate.default(geometry, arch)
        reason = candidate.feasible(plan, geometry, arch)
        if reason is None:
            return route(candidate, plan, source if forced else "default", None)
        refused.append(Refusal(candidate.name, f"default plan {plan!r}: {reason}"))

    lines = "".join(f"\n  {r.impl}: {r.reason}" for r in refused)
    raise ResolveError(f"no implementation of {declared.name} can serve {geometry!r} on {probe.arch_name(arch)}:{lines}")


def _warn_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        log.warning("%s", text)


def _report(declared: Op, geometry: Geometry, arch: int, route: Route) -> None:
    """One line per new route, so that a log shows what served what and what was passed over; lengths and batch sizes that change
    nothing else are not repeated."""
    refused = "; ".join(f"{r.impl}: {r.reason}" for r in route.refused) or "none"
    hint = ""
    if route.source == "default" and arch > 0:
        hint = f"; no tuned plan for this geometry: sm70-triton explain {declared.name} shows the lookup"
    line = f"{declared.name} {configs.stem(geometry)} on {probe.arch_name(arch)} -> {route.impl.name} ({route.source}); refused: {refused}{hint}"
    if line not in _said:
        _said.add(line)
        log.info("%s", line)
