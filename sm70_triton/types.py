"""The vocabulary of the package. A leaf: it imports nothing from sm70_triton, and no torch.

A geometry is what one rank sees, as integers and enums; a plan is a set of tile choices; an implementation turns tensors
and a plan into kernel launches and says what arithmetic it uses. All are frozen, so that they can be cache keys.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import msgspec
from typing_extensions import Self

#: The largest size of anything in a geometry or plan: kernels count in int32.
LARGEST = 2**31 - 1


class Sm70Error(Exception):
    """Base of every error this package raises for a reason of its own."""


class ResolveError(Sm70Error, LookupError):
    """No implementation can serve a geometry; the text lists each candidate and why it was refused."""


class Geometry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Local sizes of one call, as one rank sees them. `DYNAMIC` names the axes that a server changes from call to call.

    `DEFAULTS` are the values that a command line may leave out; `IGNORED` are keys that the op's family has and this op does
    not depend on.
    """

    DYNAMIC: ClassVar[tuple[str, ...]] = ()
    DEFAULTS: ClassVar[Mapping[str, Any]] = {}
    IGNORED: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def from_keys(cls, keys: Mapping[str, Any]) -> Self:
        """A geometry from command-line keys. Raises ValueError naming the key, its value and what is accepted."""
        accepted = (*cls.__struct_fields__, *cls.IGNORED)
        for key in keys:
            if key not in accepted:
                raise ValueError(f"geometry key {key!r} is not known; accepted: {', '.join(accepted)}")
        values = {**cls.DEFAULTS, **{k: v for k, v in keys.items() if k in cls.__struct_fields__}}
        for key, value in values.items():
            if isinstance(value, int) and not -LARGEST <= value <= LARGEST:
                raise ValueError(f"geometry key {key!r} is {len(str(abs(value)))} digits long; sizes up to {LARGEST} are accepted")
        try:
            return msgspec.convert(values, cls)
        except (msgspec.ValidationError, UnicodeError) as error:  # a lone surrogate is no text
            raise ValueError(f"geometry {dict(keys)}: {error}") from error

    def static(self) -> dict[str, Any]:
        """The axes that select a config file."""
        return {f: getattr(self, f) for f in self.__struct_fields__ if f not in self.DYNAMIC}

    def dynamic(self) -> dict[str, int]:
        """The axes that select a bucket inside the file."""
        return {f: getattr(self, f) for f in self.DYNAMIC}


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tile choices of one implementation; subclasses add the fields. Numbers are at least 1; those of `block_*` and `num_warps`
    (at most 32) are powers of two, as Triton demands. Raises ValueError.
    """

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                continue
            if not 1 <= value <= LARGEST or (name == "num_warps" and value > 32):
                raise ValueError(f"{name}={value}: 1 to {32 if name == 'num_warps' else LARGEST} is accepted")
            if (name == "num_warps" or name.startswith("block_")) and value & (value - 1):
                raise ValueError(f"{name}={value}: a power of two is accepted")


class Arithmetic(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an implementation computes in. `None` means that the op has no such step.

    Bits are those of the accumulator. `weight_decode` is "exact" when the decoded weight (code x scale x global scale) is
    formed in FP32 with at most one rounding, "rounded" when an intermediate is kept in fewer bits.
    """

    qk_accum_bits: int | None = None
    pv_accum_bits: int | None = None
    accum_bits: int | None = None
    weight_decode: str | None = None
    cache_encode: str | None = None

    def refusal(self, required: Arithmetic) -> str | None:
        """Why this arithmetic does not meet `required`, or None. A step that the op lacks meets any requirement."""
        for name in ("qk_accum_bits", "pv_accum_bits", "accum_bits"):
            have, want = getattr(self, name), getattr(required, name)
            if have is not None and want is not None and have < want:
                return f"{name} is {have}, at least {want} is required"
        for name in ("weight_decode", "cache_encode"):
            have, want = getattr(self, name), getattr(required, name)
            if have is not None and want is not None and have != want:
                return f"{name} is {have!r}, {want!r} is required"
        return None


#: The default admission: FP32 accumulation everywhere and exact weights.
FULL_PRECISION = Arithmetic(qk_accum_bits=32, pv_accum_bits=32, accum_bits=32, weight_decode="exact", cache_encode="exact")


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine must have. `min_arch` and `max_arch` are compute capability x 10; 0 is a CPU. `max_arch` is inclusive."""

    min_arch: int
    max_arch: int | None = None
    packages: tuple[str, ...] = ()


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One geometry that tests, compile checks and benchmarks run. `production` cases are too large for a CPU to execute."""

    name: str
    geometry: Geometry
    options: Mapping[str, Any] = {}
    production: bool = False

    def __hash__(self) -> int:
        return hash((self.name, self.geometry))


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """The least a call must do: floating-point operations, and bytes that must move through device memory."""

    flops: int
    bytes: int


class Refusal(msgspec.Struct, frozen=True):
    impl: str
    reason: str


class Impl(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One way to serve an op.

    `launch(plan, geometry, **tensors)` only launches: no environment, no JSON, no registry, no `.item()`, no allocation.
    `supports` and `feasible` return None, or the reason for a refusal. Larger `priority` is tried first when no config names
    an implementation. `automatic` false means that only an explicit choice (override, SM70_TRITON_IMPL) takes it on a GPU.
    """

    op: str
    name: str
    rev: int
    needs: Needs
    arithmetic: Arithmetic
    plan: type[Plan]
    launch: Callable[..., None]
    supports: Callable[[Any, int], str | None]
    feasible: Callable[[Any, Any, int], str | None]
    default: Callable[[Any, int], Plan]
    candidates: Callable[[Any, int], Iterable[Plan]]
    priority: int = 0
    automatic: bool = True


class Op(msgspec.Struct, kw_only=True, eq=False):
    """An operation: its specification and everything that is derived from it. See `registry.op` for the fields."""

    name: str
    geometry: type[Geometry]
    schema: str
    outputs: tuple[str, ...]
    call: Callable[..., Any]
    run: Callable[..., None]
    reference: Callable[..., dict[str, Any]]
    cases: tuple[Case, ...]
    make_inputs: Callable[..., dict[str, Any]]
    tolerance: Callable[..., dict[str, Any]]
    work: Callable[[Any], Work]
    impls: dict[str, Impl] = msgspec.field(default_factory=dict)


class Route(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What `resolve` decided, and why: `source` is "override", "env", "config_dir", "user", "shipped" or "default"."""

    impl: Impl
    plan: Plan
    source: str
    file: str | None
    refused: tuple[Refusal, ...]
