"""Attention: an oracle of its own for the reference, planted bugs, wild indices, bitwise promises, bad arguments."""
import json
import math
import os
import subprocess
import sys
from itertools import product

import pytest
import torch
from support import ROOT

from sm70_triton import attn_decode, attn_prefill, kv_write, override, verify
from sm70_triton.ops import _attention, _kv
from sm70_triton.ops import attn_decode as decode_file
from sm70_triton.ops import attn_prefill as prefill_file

PREFILL, DECODE = prefill_file.OP, decode_file.OP
PrefillGeometry, DecodeGeometry = prefill_file.AttnPrefillGeometry, decode_file.AttnDecodeGeometry
LENS = ((15, 66), (4, 4), (1, 50))


def prefill_inputs(seed, device, lens=LENS, geometry=None, **options):
    keys = {"q_heads": 6, "kv_heads": 2, "head_dim": 32, "batch": len(lens), "q_len": max(q for q, _ in lens), "kv_len": max(k for _, k in lens),
            "page_size": 5, **(geometry or {})}  # fmt: skip
    return PREFILL.make_inputs(PrefillGeometry.from_keys(keys), seed=seed, device=device, lens=lens, **options)


def decode_inputs(seed, device, lens=(150, 9, 64), geometry=None, **options):
    keys = {"q_heads": 6, "kv_heads": 2, "head_dim": 32, "batch": len(lens), "kv_len": max(lens), "page_size": 5, **(geometry or {})}
    return DECODE.make_inputs(DecodeGeometry.from_keys(keys), seed=seed, device=device, lens=lens, **options)


ALL = {"kv_dtype": "e4m3", "window": 21, "softcap": True, "sinks": True, "alibi": True}


def oracle(inputs, bug=None):
    """One query, one head, one key at a time; `bug` plants an error."""
    q, table, page = inputs["q"], inputs["block_table"], inputs["k_cache"].shape[1]
    kind = _kv.kv_dtype_of(inputs["k_cache"], inputs["kv_dtype"])
    k_cache, v_cache = (_kv.dequantize(inputs[name], kind) for name in ("k_cache", "v_cache"))
    heads, dim = q.shape[1:]
    kv_heads = k_cache.shape[2]
    group = heads // kv_heads
    bounds = inputs["cu_seqlens_q"].tolist() if "cu_seqlens_q" in inputs else list(range(len(q) + 1))
    out, lse = torch.full(q.shape, math.nan, dtype=torch.float64), torch.full(q.shape[:2], math.nan, dtype=torch.float64)
    scale = inputs["scale"] or dim**-0.5
    causal, window, cap = inputs.get("causal", True), inputs["window"], inputs["softcap"]
    ks, vs = (None if bug == name else inputs[name] for name in ("k_scale", "v_scale"))
    for b, length in enumerate(inputs["seq_lens"].tolist()):
        q_len = bounds[b + 1] - bounds[b]
        for i, h in product(range(q_len), range(heads)):
            position = length - q_len + i
            scores, values = [], []
            for j in range(length):
                if causal and j > position + (bug == "mask one ahead") - (bug == "mask one behind"):
                    continue
                if window and abs(position - j) >= window + (bug == "window one more") - (bug == "window one less"):
                    continue
                if bug == "dropped page" and j // page == max(0, position // page - 1):
                    continue
                slot = int(table[b, j // page]), j % page, h // group if bug != "wrong kv head" else h % kv_heads
                x = float(q[bounds[b] + i, h].double() @ k_cache[slot].cpu()) * scale
                x *= float(ks.flatten()[slot[2] % ks.numel()]) if ks is not None else 1.0
                if cap and bug != "softcap":
                    x = cap * math.tanh(x / cap)
                if inputs["alibi_slopes"] is not None:
                    x += float(inputs["alibi_slopes"][h]) * (j - position + (3 if bug == "alibi reversed" and j % 2 else 0))
                scores.append(x)
                values.append(v_cache[slot] * (float(vs.flatten()[slot[2] % vs.numel()]) if vs is not None else 1.0))
            sink = float(inputs["sinks"][h]) if inputs["sinks"] is not None and bug != "sinks" else -math.inf
            top = max([sink, *scores])
            p = [math.exp(s - top) for s in scores]
            total = sum(p) + (math.exp(sink - top) if sink > -math.inf else 0.0)
            if bug == "p in fp16":
                p = torch.tensor(p, dtype=torch.float64).half().double().tolist()
            at = bounds[b] + i, h
            out[at] = sum((w * v for w, v in zip(p, values, strict=True)), torch.zeros(dim, dtype=torch.float64)) / total if total else 0.0
            lse[at] = top + math.log(total) if total else -math.inf
    return {"out": out, "lse": lse}


def on_cpu(inputs):
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


SETTINGS = [
    pytest.param({}, {}, id="plain"),
    pytest.param({"causal": False, "window": 9}, {"lens": ((20, 31), (9, 2))}, id="window_not_causal"),
    pytest.param({"sinks": True}, {"lens": ((3, 7), (2, 0))}, id="padding_with_sinks"),
    pytest.param(ALL, {"scaled": True, "scale": 0.3}, id="everything"),
    pytest.param({"kv_dtype": "e5m2"}, {"scaled": "tensor"}, id="one_scale"),
]


@pytest.mark.parametrize("geometry, options", SETTINGS)
def test_prefill_reference_equals_the_oracle(geometry, options, seed):
    inputs = prefill_inputs(seed, "cpu", geometry=geometry, **options)
    want, got = oracle(inputs), PREFILL.reference(**inputs)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-11, atol=1e-11, equal_nan=True)


@pytest.mark.parametrize("geometry, options", [({}, {}), (ALL, {"scaled": True, "scale": 0.3})])
def test_decode_reference_equals_the_oracle(geometry, options, seed):
    inputs = decode_inputs(seed, "cpu", lens=(33, 0, 1), geometry=geometry, **options)
    want, got = oracle(inputs), DECODE.reference(**inputs)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-11, atol=1e-11)


BUGS = ["mask one ahead", "mask one behind", "window one more", "window one less", "dropped page", "wrong kv head", "k_scale", "v_scale", "softcap",
        "sinks", "alibi reversed", "p in fp16"]  # fmt: skip


@pytest.mark.parametrize("bug", [None, *BUGS])
def test_tolerance_sees_planted_bugs(bug, seed):
    """The bound passes the oracle's own result rounded to FP16, and none of the bugs. Outputs alone, without the lse, must show it."""
    geometry = ALL if bug != "p in fp16" else {}
    inputs = prefill_inputs(seed, "cpu", geometry=geometry, scaled=geometry is ALL, scale=0.3, lse=False, lens=((12, 66), (4, 4)))
    inputs["out"] = oracle(inputs, bug)["out"].half()
    check = verify.compare(PREFILL, inputs, PREFILL.reference(**inputs))
    assert check.ok == (bug is None), f"seed {seed}: {check}"


@pytest.mark.parametrize("op, build", [(PREFILL, prefill_inputs), (DECODE, decode_inputs)], ids=["prefill", "decode"])
@pytest.mark.parametrize("impl", ["torch", "simt"])
def test_bound_is_not_loose(op, build, impl, device, seed):
    """Neither for the output nor for the lse, which has no FP16 rounding to hide behind."""
    inputs = build(seed, device, **({"lens": (150, 9, 64, 100, 31, 77, 120, 45)} if op is DECODE else {}))
    expected = op.reference(**inputs)
    with override(op.name, impl):
        op.call(**inputs)
    for name in ("out", "lse"):
        check = verify.compare(op, inputs, {name: expected[name]})
        assert 0.01 < check.worst <= 1, f"{name}: {check}"


def unchecked(monkeypatch):
    """As on a GPU outside debug mode: nobody looks at lengths and page ids before the kernel does."""
    monkeypatch.setattr(_attention, "values_are_checked", lambda device: False)


def fenced(inputs, name):
    """The tensor moved into the middle of a larger one full of traps: reading around it changes the result."""
    old = inputs[name]
    if name == "block_table":
        big = torch.zeros(old.shape[0] + 2, old.shape[1] + 4, dtype=old.dtype, device=old.device)
        view = big[1:-1, 2:-2]
    else:
        big = _kv.poison((old.shape[0] + 2, *old.shape[1:]), old.dtype, str(old.device))
        view = big[1:-1]
    inputs[name] = view.copy_(old)


def wild_page(inputs):
    inputs["block_table"][0, 1] = -1
    inputs["block_table"][1, 0] = inputs["k_cache"].shape[0]
    inputs["block_table"][2, 2] = 2**31 - 1


def wild_length(inputs):
    inputs["seq_lens"][0] = inputs["block_table"].shape[1] * inputs["k_cache"].shape[1] + 7
    inputs["seq_lens"][1] = -5


def longest_length(inputs):
    inputs["seq_lens"][0] = 2**31 - 1


@pytest.mark.parametrize("spoil", [wild_page, wild_length, longest_length], ids=lambda f: f.__name__)
@pytest.mark.parametrize("op, build", [(PREFILL, prefill_inputs), (DECODE, decode_inputs)], ids=["prefill", "decode"])
def test_kernels_never_read_beyond_the_tensors(op, build, spoil, device, seed, monkeypatch):
    inputs = build(seed, device)
    for name in ("k_cache", "v_cache", "block_table"):
        fenced(inputs, name)
    if spoil is not wild_page:  # the whole row of the table is in use then
        table = inputs["block_table"]
        table[...] = torch.randint(0, inputs["k_cache"].shape[0], table.shape, generator=torch.Generator().manual_seed(seed)).to(table)
        for name in ("k_cache", "v_cache"):
            inputs[name].copy_(torch.randn(inputs[name].shape, generator=torch.Generator().manual_seed(seed)))
    spoil(inputs)
    expected = op.reference(**inputs)
    with pytest.raises(ValueError, match=r"block_table\[|seq_lens\["):
        op.call(**on_cpu(inputs))
    unchecked(monkeypatch)
    with override(op.name, "simt"):
        op.call(**inputs)
    check = verify.compare(op, inputs, expected)
    assert check.ok, f"seed {seed}: {check}"


def test_queries_beyond_q_and_lengths_below_q_len(device, seed, monkeypatch):
    inputs = prefill_inputs(seed, device, lens=((4, 20), (6, 30), (3, 9)))
    inputs["cu_seqlens_q"][3] = 50  # q has 13 rows
    inputs["seq_lens"][1] = 2  # fewer keys than queries: the first four rows stand before the first key
    with pytest.raises(ValueError, match=r"cu_seqlens_q\[-1\]=50 exceeds the 13 tokens"):
        attn_prefill(**on_cpu(inputs))
    guard = torch.full((20, *inputs["q"].shape[1:]), math.nan, dtype=torch.float16, device=device)
    inputs["out"] = guard[:13]
    inputs["max_seqlen_q"] = 40
    unchecked(monkeypatch)
    with override("attn_prefill", "simt"):
        attn_prefill(**inputs)
    right = {**inputs, "cu_seqlens_q": torch.tensor([0, 4, 10, 13], dtype=torch.int32, device=device)}
    check = verify.compare(PREFILL, right, PREFILL.reference(**right))
    assert check.ok, f"seed {seed}: {check}"
    assert bool(guard[13:].isnan().all())
    assert bool((inputs["out"][4:8] == 0).all()) and bool((inputs["lse"][4:8] == -math.inf).all())


def run_simt(op, inputs, plan):
    """Output and log-sum-exp, whose float32 hides less than FP16: [rows, heads, head_dim + 1]."""
    lse = torch.full(inputs["q"].shape[:2], math.nan, device=inputs["q"].device)
    with override(op.name, "simt", plan=plan):
        return torch.cat((op.call(**{**inputs, "out": None, "lse": lse}).float(), lse[..., None]), -1)


def test_rows_do_not_depend_on_what_is_around_them(device, seed):
    """Bit for bit: a batch and its sequences alone; a prompt and its chunks; heads together and heads one by one."""
    inputs = prefill_inputs(seed, device, lens=((30, 66), (4, 4), (9, 50)), geometry={"window": 37})
    plan = prefill_file.SimtPlan(block_m=16, block_n=16, num_warps=4)
    together = run_simt(PREFILL, inputs, plan)
    bounds = inputs["cu_seqlens_q"].tolist()

    def part(sequence, first, last, heads=slice(None), kv_heads=slice(None)):
        """Queries first..last of a sequence as a call of their own."""
        rows = slice(bounds[sequence] + first, bounds[sequence] + last)
        after = bounds[sequence + 1] - bounds[sequence] - last
        ints = {"dtype": torch.int32, "device": device}
        alone = {
            **inputs, "q": inputs["q"][rows, heads], "block_table": inputs["block_table"][sequence : sequence + 1],
            "seq_lens": inputs["seq_lens"][sequence : sequence + 1] - after, "cu_seqlens_q": torch.tensor([0, last - first], **ints),
            "max_seqlen_q": last - first, "k_cache": inputs["k_cache"][:, :, kv_heads], "v_cache": inputs["v_cache"][:, :, kv_heads],
        }  # fmt: skip
        return torch.equal(run_simt(PREFILL, alone, plan), together[rows, heads])

    assert part(0, 0, 30) and part(1, 0, 4) and part(2, 0, 9)
    assert part(0, 0, 11) and part(0, 11, 30)
    assert part(0, 0, 30, slice(4, 5), slice(1, 2))


def test_decode_does_not_depend_on_the_batch_or_the_workspace(device, seed):
    inputs = decode_inputs(seed, device, lens=(150, 9, 64))
    plan = decode_file.SimtPlan(block_n=16, num_warps=4, num_splits=3)
    together = run_simt(DECODE, inputs, plan)
    for b in range(3):
        alone = {**inputs, **{name: inputs[name][b : b + 1] for name in ("q", "block_table", "seq_lens")}}
        alone["workspace"] = torch.full_like(inputs["workspace"], math.inf)
        assert torch.equal(run_simt(DECODE, alone, plan), together[b : b + 1])
    alone["workspace"] = torch.full((inputs["workspace"].nbytes,), 0xFF, dtype=torch.uint8, device=device)
    assert torch.equal(run_simt(DECODE, alone, plan), together[2:])


@pytest.mark.parametrize("plan", [prefill_file.SimtPlan(block_m=m, block_n=n, num_warps=w) for m, n, w in ((16, 16, 2), (32, 64, 8), (128, 32, 8))], ids=str)
def test_prefill_plans(plan, device, seed):
    inputs = prefill_inputs(seed, device, geometry=ALL, scaled=True)
    expected = PREFILL.reference(**inputs)
    with override("attn_prefill", "simt", plan=plan):
        attn_prefill(**inputs)
    check = verify.compare(PREFILL, inputs, expected)
    assert check.ok, f"seed {seed}: {check}"


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 13])
def test_decode_splits(splits, device, seed):
    """Splits that end inside a page, at a page, beyond the shorter sequences and beyond the window."""
    inputs = decode_inputs(seed, device, lens=(801, 9, 64, 0), geometry={**ALL, "window": 333}, scaled=True)
    expected = DECODE.reference(**inputs)
    with override("attn_decode", "simt", plan=decode_file.SimtPlan(block_n=64, num_warps=4, num_splits=splits)):
        attn_decode(**inputs)
    check = verify.compare(DECODE, inputs, expected)
    assert check.ok, f"seed {seed}: {check}"


def test_replayed_decode_follows_the_device_lengths(device, seed):
    """A launch's host values stay as captured; only tensors change: lengths, page table, queries."""
    inputs = decode_inputs(seed, device, lens=(150, 150, 150))
    for lens in ((150, 0, 1), (64, 65, 128), (5, 149, 63)):
        inputs["seq_lens"].copy_(torch.tensor(lens))
        inputs["block_table"].copy_(inputs["block_table"].roll(1, 0))
        expected = DECODE.reference(**inputs)
        with override("attn_decode", "simt"):
            attn_decode(**inputs)
        check = verify.compare(DECODE, inputs, expected)
        assert check.ok, f"seed {seed}, {lens}: {check}"


def test_workspace_is_a_function_of_the_sizes():
    sizes = {"q_heads": 24, "kv_heads": 4, "head_dim": 256}
    need = [decode_file.attn_decode_workspace(batch=1, max_seqlen_k=n, **sizes) for n in (0, 64, 65, 4096, 32768, 2**18)]
    assert need[:2] == [0, 0] and need == sorted(need)
    assert need[-1] == 4 * 80 * 24 * 258  # 2 x 2 programs on each of 80 multiprocessors, 4 KV heads
    assert decode_file.attn_decode_workspace(batch=512, max_seqlen_k=2**18, **sizes) == 0
    with pytest.raises(ValueError, match="q_heads=5 is not a multiple of kv_heads=2"):
        decode_file.attn_decode_workspace(batch=1, q_heads=5, kv_heads=2, head_dim=64, max_seqlen_k=9)


@pytest.mark.parametrize("impl", ["torch", "simt"])
@pytest.mark.parametrize("op, build", [(PREFILL, prefill_inputs), (DECODE, decode_inputs)], ids=["prefill", "decode"])
def test_scales_of_any_shape(op, build, impl, device, seed):
    """[heads, 1], [1, heads, 1], [1, 1] and [] are common in checkpoints."""
    inputs = build(seed, device, geometry={"kv_dtype": "e4m3"}, scaled=True)
    with override(op.name, impl):
        for one in (False, True):
            scales = [inputs[name][:1] if one else inputs[name] for name in ("k_scale", "v_scale")]
            want = op.call(**{**inputs, "k_scale": scales[0], "v_scale": scales[1], "out": None})
            for shape in ((1, 1), ()) if one else ((2, 1), (1, 2, 1)):
                k_scale, v_scale = (scale.reshape(shape) for scale in scales)
                assert torch.equal(op.call(**{**inputs, "k_scale": k_scale, "v_scale": v_scale, "out": None}), want), shape


@pytest.mark.parametrize("causal", [True, False])
def test_the_widest_window_is_no_window(causal, device, seed):
    """Positions plus or minus 2^31 - 1 do not fit in int32; queries before the first key have negative positions."""
    lens = ((15, 66), (4, 0), (9, 3)) if not causal else LENS
    inputs = prefill_inputs(seed, device, lens=lens, geometry={"causal": causal})
    plan = prefill_file.SimtPlan(block_m=16, block_n=16, num_warps=4)
    everything = run_simt(PREFILL, inputs, plan)
    for window in (2**31 - 1, 2**31 - 5):
        assert torch.equal(run_simt(PREFILL, {**inputs, "window": window}, plan), everything)


def test_heads_far_apart(device, seed):
    """Heads as the outermost axis of a cache: head * stride exceeds int32. The storage is 2 GiB of which few pages are touched."""
    storage = torch.empty(2**31 + 2**16, dtype=torch.uint8, device=device)
    caches = [storage.as_strided((2, 4, 3, 16), (64, 16, 2**30, 1), offset) for offset in (0, 4096)]
    g = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(5, 3, 16, generator=g).half().to(device) for _ in "kv")
    slots = torch.tensor([4, 5, 6, 7, 0], device=device)
    ints = {"dtype": torch.int32, "device": device}
    found = {}
    for far, (k_cache, v_cache) in ((True, caches), (False, [torch.empty((2, 4, 3, 16), dtype=torch.uint8, device=device) for _ in "kv"])):
        for cache in (k_cache, v_cache):
            cache.fill_(0x7F)
        inputs = {
            "q": torch.ones(1, 6, 16, dtype=torch.float16, device=device), "k_cache": k_cache, "v_cache": v_cache,
            "block_table": torch.tensor([[1, 0]], **ints), "seq_lens": torch.tensor([5], **ints), "max_seqlen_k": 5, "kv_dtype": "e5m2",
        }  # fmt: skip
        with override("kv_write", "simt"), override("attn_decode", "simt"), override("attn_prefill", "simt"):
            kv_write(key, value, k_cache, v_cache, slots, kv_dtype="e5m2")
            found[far] = [k_cache, v_cache, attn_decode(**inputs), attn_prefill(**inputs, cu_seqlens_q=torch.tensor([0, 1], **ints), max_seqlen_q=1)]
    for far, near in zip(found[True], found[False], strict=True):
        assert torch.equal(far, near) and bool((near[:1] != 0).any())


@pytest.mark.parametrize("kv_dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("impl", ["torch", "simt"])
def test_every_nan_is_stored_as_0x7f(impl, kv_dtype, device):
    """Also one with a sign, and in the middle of a vector: the bytes must not depend on the implementation."""
    nan = torch.full((3, 1, 64), -512, dtype=torch.int16, device=device).view(torch.float16)  # 0xfe00
    caches = [torch.zeros(1, 4, 1, 64, dtype=torch.uint8, device=device) for _ in "kv"]
    with override("kv_write", impl):
        kv_write(nan, nan, *caches, torch.arange(3, device=device), kv_dtype=kv_dtype)
    for cache in caches:
        assert bool((cache[:, :3] == 0x7F).all()) and bool((cache[:, 3:] == 0).all())


@pytest.mark.parametrize("heads, dim", [(0, 16), (2, 0)])
@pytest.mark.parametrize("impl", ["torch", "simt"])
def test_nothing_to_write(impl, heads, dim, device):
    key, cache = (torch.zeros(*shape, heads, dim, dtype=torch.float16, device=device) for shape in ((3,), (2, 4)))
    with override("kv_write", impl):
        kv_write(key, key, cache, cache.clone(), torch.arange(3, device=device))


def test_a_launch_is_no_longer_than_the_queries(monkeypatch, seed):
    """max_seqlen_q may be a server's limit; a grid of 2^31 query tiles would not start."""
    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **kwargs: None

    monkeypatch.setattr(prefill_file, "_attn_prefill_simt_kernel", Kernel())
    with override("attn_prefill", "simt"):
        attn_prefill(**{**prefill_inputs(seed, "cpu"), "max_seqlen_q": 2**31 - 1})
    assert grids[0][0] <= 20 * 3 * 3  # 20 tokens x 3 heads of a group in tiles of at least one row, 3 sequences


BAD = [
    ("prefill", {"q": lambda t: t.float()}, TypeError, "q.dtype=torch.float32; accepted: float16"),
    ("prefill", {"q": lambda t: t[:, :5]}, ValueError, "q has 5 heads"),
    ("prefill", {"q": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)}, ValueError, "q.stride.*last axis must be contiguous"),
    ("prefill", {"q": lambda t: t[..., :16]}, ValueError, "k_cache.shape=.*head dimension must be that of q, 16"),
    ("prefill", {"v_cache": lambda t: t[:1]}, ValueError, "v_cache.shape=.*must equal k_cache.shape"),
    ("prefill", {"kv_dtype": "e4m3"}, ValueError, "kv_dtype='e4m3' contradicts"),
    ("prefill", {"k_scale": torch.ones(2)}, ValueError, "k_scale was given with an FP16 cache"),
    ("prefill", {"block_table": lambda t: t.long()}, TypeError, "block_table.dtype=torch.int64; accepted: int32"),
    ("prefill", {"block_table": lambda t: t[:2]}, ValueError, "seq_lens has 3 sequences, block_table.shape="),
    ("prefill", {"cu_seqlens_q": lambda t: t[:3]}, ValueError, "cu_seqlens_q has 3 elements; seq_lens asks for 4"),
    ("prefill", {"cu_seqlens_q": lambda t: t.flip(0)}, ValueError, r"cu_seqlens_q\[1\]=19 is smaller"),
    ("prefill", {"max_seqlen_q": 3}, ValueError, "sequence 0 has 15 queries, more than max_seqlen_q=3"),
    ("prefill", {"max_seqlen_k": 60}, ValueError, r"seq_lens\[0\]=66 exceeds max_seqlen_k=60"),
    ("prefill", {"max_seqlen_q": -1}, ValueError, "max_seqlen_q=-1: it must be at least 0"),
    ("prefill", {"seq_lens": lambda t: t - 60}, ValueError, r"seq_lens\[1\]=-56: it must not be negative"),
    ("prefill", {"seq_lens": lambda t: t.clamp_max(3)}, ValueError, r"seq_lens\[0\]=3 does not include the sequence's 15 new tokens"),
    ("prefill", {"window": 0}, ValueError, "window=0: at least 1, or None"),
    ("prefill", {"softcap": -1.0}, ValueError, "softcap=-1.0: a positive number, or None"),
    ("prefill", {"scale": math.nan}, ValueError, "scale=nan: it must be finite"),
    ("prefill", {"sinks": torch.zeros(2)}, ValueError, "sinks has 2 elements; one per query head is needed, 6"),
    ("prefill", {"alibi_slopes": torch.zeros(6, dtype=torch.float64)}, TypeError, "alibi_slopes.dtype=torch.float64"),
    ("prefill", {"out": lambda t: t[:1]}, ValueError, "out.shape=.*must equal q.shape"),
    ("prefill", {"lse": lambda t: t.half()}, TypeError, "lse.dtype=torch.float16; accepted: float32"),
    ("decode", {"seq_lens": lambda t: t[:2], "block_table": lambda t: t[:2]}, ValueError, "seq_lens has 2 elements, q has 3 sequences"),
    ("decode", {"workspace": lambda t: t[:-1]}, ValueError, "workspace has .* bytes; attn_decode_workspace asks for"),
    ("decode", {"workspace": lambda t: t.double()}, TypeError, "workspace.dtype=torch.float64; accepted: float32, uint8"),
    ("decode", {"workspace": lambda t: torch.empty(t.nbytes + 1, dtype=torch.uint8)[1:]}, ValueError, "workspace begins at byte 1 of its storage"),
    ("decode", {"q": None, "out": lambda t: t}, TypeError, "q is a NoneType; a tensor"),
    ("decode", {"k_cache": None}, TypeError, "k_cache is a NoneType; a tensor"),
    ("decode", {"seq_lens": [150, 9, 64]}, TypeError, "seq_lens is a list; a tensor"),
    ("decode", {"k_scale": 0.5}, TypeError, "k_scale is a float; a float32 tensor or None"),
    ("decode", {"max_seqlen_k": torch.tensor(150)}, TypeError, "max_seqlen_k is a Tensor; an int"),
    ("prefill", {"max_seqlen_q": 15.0}, TypeError, "max_seqlen_q is a float; an int"),
    ("prefill", {"scale": torch.tensor(0.1)}, TypeError, "scale is a Tensor; a float"),
    ("prefill", {"softcap": 1e300}, ValueError, "softcap=1e.300: a positive number"),
    ("prefill", {"scale": 1e300}, ValueError, "scale=1e.300: it must be finite"),
    ("prefill", {"window": 2.5}, TypeError, "window is a float; an int"),
    ("prefill", {"window": 2**31}, ValueError, "window=2147483648: .*below 2.31"),
    ("prefill", {"out": lambda t: t[:1].expand(t.shape)}, ValueError, "out.shape=.*must not be expanded"),
    ("prefill", {"lse": lambda t: t[:1].expand(t.shape)}, ValueError, "lse.shape=.*must not be expanded"),
    ("decode", {"max_seqlen_k": 100}, ValueError, r"seq_lens\[0\]=150 exceeds max_seqlen_k=100"),
]


@pytest.mark.parametrize("which, change, kind, message", BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_arguments_are_named(which, change, kind, message, seed):
    build, call = (prefill_inputs, attn_prefill) if which == "prefill" else (decode_inputs, attn_decode)
    inputs = build(seed, "cpu")
    for name, new in change.items():
        inputs[name] = new(inputs[name]) if callable(new) else new
    with pytest.raises(kind, match=message):
        call(**inputs)


@pytest.mark.parametrize("keys, message", [
    ({"q_heads": 7, "kv_heads": 2}, "q_heads=7 is not a multiple of kv_heads=2"),
    ({"kv_len": -1}, "kv_len=-1: it must not be negative"),
    ({"head_dim": 0}, "head_dim=0: it must be at least 1"),
    ({"head_dim": 513}, "head_dim=513; accepted: 1 to 512"),
    ({"kv_dtype": "int3"}, "kv_dtype='int3'; accepted: fp16, e4m3, e5m2"),
    ({"softcap": -2}, "softcap=-2"),
    ({"batch": "many"}, "batch"),
    ({"tp": 4}, "'tp' is not known; accepted: .*q_heads"),
])  # fmt: skip
def test_bad_geometry_keys_are_named(keys, message):
    for geometry in (PrefillGeometry, DecodeGeometry):
        with pytest.raises(ValueError, match=message):
            geometry.from_keys(keys)


def test_geometry_keys():
    keys = {"q_heads": 6, "kv_heads": 1, "head_dim": 256, "batch": 2, "q_len": 64, "kv_len": 100, "kv_dtype": "e4m3", "page_size": 784, "causal": True,
            "window": None, "softcap": 30.0, "sinks": False, "alibi": False}  # fmt: skip
    prefill, decode = PrefillGeometry.from_keys(keys), DecodeGeometry.from_keys(keys)
    assert (prefill.softcap, prefill.window, prefill.q_len) == (True, 0, 64) and prefill.dynamic() == {"batch": 2, "q_len": 64, "kv_len": 100}
    assert decode.dynamic() == {"batch": 2, "kv_len": 100} and decode.group == 6
    assert PrefillGeometry.from_keys({"softcap": 0}).softcap is False


@pytest.mark.parametrize("causal, window", list(product((True, False), (0, 1, 7, 100))))
def test_work_counts_visible_pairs(causal, window):
    geometry = PrefillGeometry.from_keys({"q_len": 13, "kv_len": 29, "causal": causal, "window": window, "batch": 3})
    pairs = keys = 0
    for p, j in product(range(16, 29), range(29)):
        pairs += (not causal or j <= p) and (not window or abs(p - j) < window)
    keys = sum(any((not causal or j <= p) and (not window or abs(p - j) < window) for p in range(16, 29)) for j in range(29))
    work = PREFILL.work(geometry)
    assert work.flops == 4 * 3 * 32 * 128 * pairs
    assert work.bytes == 3 * (2 * 2 * keys * 8 * 128 + 2 * 2 * 13 * 32 * 128)


COMPILE = """
import json
from sm70_triton import aot
from sm70_triton.ops import _attention, attn_decode, attn_prefill
found = []
for keys in ({"head_dim": 64}, {"q_heads": 48, "kv_heads": 1}, {"head_dim": 72, "kv_dtype": "e5m2", "alibi": True}, {"head_dim": 256, "q_heads": 24, "kv_heads": 4, "kv_dtype": "e4m3"}):
    for op in (attn_prefill.OP, attn_decode.OP):
        geometry = op.geometry.from_keys(keys)
        route, launches = aot.compile(op, geometry, 70, impl="simt")
        usage = aot.usage(launches[0])
        rows = getattr(route.plan, "block_m", _attention.next_power_of_2(geometry.group))
        found.append([str(geometry), usage.stack_bytes, usage.shared_bytes, _attention.simt_shared_bytes(geometry, rows, route.plan.block_n)])
print(json.dumps(found))
"""


def test_default_plans_do_not_spill_and_fit_as_calculated():
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=clean, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for geometry, stack, real, calculated in json.loads(done.stdout):
        assert stack == 0, geometry
        assert real <= calculated <= 1.1 * real + 1024, f"{geometry}: {real} bytes, calculated {calculated}"
