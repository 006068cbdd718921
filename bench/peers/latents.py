"""The cases and contestants of latent attention at DeepSeek-V3's sizes: products, the write into
the cache, and a whole attention layer for decodes and prompts, beside chains of PyTorch's
operators. All launches are in CUDA graphs, so PyTorch's eager operators cost no host time."""

import functools
from types import SimpleNamespace

import torch

from cases import Case, MLA, STATE_FOOTPRINT, big_rand, latents, lengths_text, nbytes, rand, sets_needed

HIDDEN, Q_LORA, LATENT, PE, NOPE, VALUE = 7168, 1536, 512, 64, 128, 128
EPS = 1e-6
OURS = "lockstep"
SETTLED = f"{OURS}, weights settled"  # written before the launch in front began, which no peer can be told

# (name, G matrices, M tokens, N rows and K columns of each weight matrix).
PRODUCTS = [(name, G, M, N, K) for M in (1, 32, 128) for name, G, N, K in (
    ("qkv_a", 1, Q_LORA + LATENT + PE, HIDDEN), ("q_b", 1, 128 * (NOPE + PE), Q_LORA), ("absorb", 128, LATENT, NOPE),
    ("un-absorb", 128, VALUE, LATENT), ("o_proj", 1, HIDDEN, 128 * VALUE), ("absorb of 16 heads", 16, LATENT, NOPE))]
PRODUCTS += [(name, 1, 4096, N, K) for name, N, K in (("q_b", 128 * (NOPE + PE), Q_LORA), ("kv_b", 128 * 256, LATENT),
                                                      ("o_proj", HIDDEN, 128 * VALUE))]
SCALED = [("absorb", 128, M, LATENT, NOPE) for M in (32, 128)] + [("q_b", 1, M, 128 * (NOPE + PE), Q_LORA) for M in (32, 128)]
WRITES = [(form, H, T) for form in ("bf16", "e4m3", "token656") for H, T in ((128, 32), (128, 4096))]
# (heads of a rank, requests, tokens of each, the cache's form, scales of absorbing weights in e4m3:
# one for the "tensor", one for each of its "blocks", or None for weights in bf16).
LAYERS = [(H, B, 4096, "bf16", None) for H in (128, 16) for B in (1, 32, 128)]
LAYERS += [(H, B, 4096, form, None) for form in ("e4m3", "token656") for H, B in ((128, 32), (16, 128))]
LAYERS += [(H, 32, 4096, "bf16", scaled) for scaled in ("tensor", "blocks") for H in (128, 16)]
# (heads, new tokens of each request, cached tokens before them).
PROMPTS = [(128, (2048,), 0), (128, (2048,), 8192), (16, (8192,), 0), (16, (1024,) * 8, 0)]
CHUNK = 16384  # the most tokens of prefixes that are decompressed at a time


def product(name, G, M, N, K):
    """x [G, M, K] times weight [G, N, K] transposed. The first rows and 512 columns are compared
    with float64."""
    def make():
        return SimpleNamespace(x=rand(G, M, K), w=big_rand(G, N, K, dtype=torch.bfloat16))

    def reference(s, rows):
        return (torch.bmm(s.x[:, :rows].double(), s.w[:, :512].double().transpose(1, 2)),)

    one = make()
    traffic = nbytes(one.x, one.w) + G * M * N * 2
    sets = [one] + [make() for _ in range(sets_needed(traffic, STATE_FOOTPRINT) - 1)]
    return Case("batched_product", f"{name}: G={G} M={M} N={N} K={K}", "product", M, traffic, sets, reference,
                2 * G * M * N * K)


def scaled_product(name, G, M, N, K):
    """product() in e4m3 with one scale, 0.5, for x and one, 0.25, for the weights."""
    def make():
        return SimpleNamespace(x=rand(G, M, K).to(torch.float8_e4m3fn), w=rand(G, N, K).to(torch.float8_e4m3fn),
                               xs=torch.full((1, 1, 1), 0.5, device="cuda"), ws=torch.full((1, 1, 1), 0.25, device="cuda"))

    def reference(s, rows):
        return (torch.bmm(s.x[:, :rows].double(), s.w[:, :512].double().transpose(1, 2)) / 8,)

    one = make()
    traffic = nbytes(one.x, one.w) + G * M * N * 2
    sets = [one] + [make() for _ in range(sets_needed(traffic, STATE_FOOTPRINT) - 1)]
    return Case("batched_product", f"{name} in e4m3: G={G} M={M} N={N} K={K}", "scaled_product", M, traffic, sets,
                reference, G * M * N * K)  # half the FLOPs: e4m3 has twice the rate of bf16


def rms_norm(x, weight):
    """The RMS norm of each row of x, computed in float32 and rounded once."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.float()).to(x.dtype)


def rotated(x, cosine, sine):
    """x with each pair (2i, 2i + 1) of its last dimension rotated; cosine and sine [T, 1, 32]."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cosine - b * sine, b * cosine + a * sine], -1).flatten(-2).to(x.dtype)


def angles(s, dtype=torch.float32):
    """Cosines and sines [T, 1, 32] of positions times frequencies."""
    angle = s.positions[:, None, None].to(dtype) * s.frequencies.to(dtype)
    return torch.cos(angle), torch.sin(angle)


def cached(form, latent, pe, kv_scale):
    """Rows of a cache of this form, from latents [T, 512] and rotated keys `pe` [T, 64]: bf16
    numbers, e4m3 numbers divided by kv_scale, or tokens of 656 bytes (reference/contract.md)."""
    if form == "bf16":
        return torch.cat([latent, pe], 1)
    if form == "e4m3":
        return (torch.cat([latent, pe], 1).float() / kv_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    tiles = latent.float().unflatten(1, (4, 128))
    scale = torch.exp2(torch.ceil(torch.log2((tiles.abs().amax(2) / 448).clamp(min=1e-4))))
    numbers = (tiles / scale[..., None]).to(torch.float8_e4m3fn).flatten(1)
    return torch.cat([numbers.view(torch.uint8), scale.view(torch.uint8), pe.contiguous().view(torch.uint8)], 1)


def cache_write(form, H, T):
    """T tokens' [latent; k_pe]: the latent is normed, k_pe rotated, and both are written to random
    places of the cache; the same launch rotates q_pe [T, H, 64]."""
    pages = (T + 63) // 64 * 4
    types = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "token656": torch.uint8}
    width = 656 if form == "token656" else MLA.width

    def make():
        rows = rand(T, Q_LORA + MLA.width)
        slots = torch.randperm(pages * 64, device="cuda")[:T].to(torch.int32)
        return SimpleNamespace(
            form=form, latent=rows[:, Q_LORA:Q_LORA + LATENT], pe=rows[:, Q_LORA + LATENT:],
            q=rand(T, H, NOPE + PE)[..., NOPE:], norm=rand(LATENT, scale=0.1) + 1, slots=slots, places=slots.long(),
            cache=torch.zeros(pages, 64, width, device="cuda", dtype=types[form]),
            positions=torch.randint(0, 4096, (T,), device="cuda", dtype=torch.int32),
            frequencies=10000 ** (-torch.arange(32, device="cuda") / 32), out=torch.empty(T, H, PE, device="cuda", dtype=torch.bfloat16),
            kv_scale=torch.tensor([0.02], device="cuda") if form == "e4m3" else None)

    def reference(s, rows):
        wide = s.latent[:rows].double()
        normed = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + EPS) * s.norm.double()
        angle = s.positions[:rows, None, None].double() * s.frequencies.double()
        cosine, sine = torch.cos(angle), torch.sin(angle)
        a, b = s.q[:rows].double().unflatten(-1, (-1, 2)).unbind(-1)
        q = torch.stack([a * cosine - b * sine, b * cosine + a * sine], -1).flatten(-2)
        return q, normed

    one = make()
    traffic = T * (MLA.width * 2 + width * one.cache.element_size() + 2 * H * PE * 2 + 8)
    sets = [one] + [make() for _ in range(min(200, sets_needed(traffic, STATE_FOOTPRINT)) - 1)]
    return Case("latent_cache", f"{form} H={H} T={T}", "latent_cache", T, traffic, sets, reference)


def in_e4m3(weight, scaled):
    """(e4m3 numbers, scales, float32 products of the two) of a weight [H, rows, columns]. `scaled`
    is "tensor" for one scale, or "blocks" for one scale for each block of 128 x 128."""
    if scaled == "tensor":
        scale = wide = (weight.float().abs().max() / 448).view(1, 1, 1)
    else:
        tiles = weight.float().unflatten(2, (-1, 128)).unflatten(1, (-1, 128))  # [H, rows, 128, columns, 128]
        scale = (tiles.abs().amax((2, 4)) / 448).clamp(min=1e-12)
        wide = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
    numbers = (weight.float() / wide).to(torch.float8_e4m3fn)
    return numbers, scale, numbers.float() * wide


def layer_weights(H):
    """Random weights of a layer's attention, with H heads on this rank."""
    def draw(*shape):
        return big_rand(*shape, dtype=torch.bfloat16).mul_(shape[-1] ** -0.5)

    s = SimpleNamespace(
        qkv_a=draw(Q_LORA + MLA.width, HIDDEN), q_norm=rand(Q_LORA, scale=0.1) + 1,
        q_b=draw(H * (NOPE + PE), Q_LORA), kv_norm=rand(LATENT, scale=0.1) + 1, kv_b=draw(H * (NOPE + VALUE), LATENT),
        o_proj=draw(HIDDEN, H * VALUE), frequencies=10000 ** (-torch.arange(32, device="cuda") / 32))
    per_head = s.kv_b.view(H, NOPE + VALUE, LATENT)
    s.w_kc, s.w_vc = per_head[:, :NOPE].transpose(1, 2).contiguous(), per_head[:, NOPE:].contiguous()
    s.kc_scale = s.vc_scale = s.kv_scale = None
    s.scale = MLA.scale
    return s


def normed(y, weight):
    """The RMS norm of each row of y, in float64."""
    return y * torch.rsqrt(y.square().mean(1, keepdim=True) + EPS) * weight.double()


def turned(s, y):
    """y [T, heads, 64] rotated by the first T positions of `s`, in float64."""
    cosine, sine = angles(SimpleNamespace(positions=s.positions[:len(y)], frequencies=s.frequencies), torch.float64)
    a, b = y.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cosine - b * sine, b * cosine + a * sine], -1).flatten(-2)


def projected(s, x):
    """Rotated queries [T, heads, 192] and normed, rotated latents [T, 576] of hidden states x [T,
    7168], in float64."""
    low = x @ s.qkv_a.double().t()
    q = (normed(low[:, :Q_LORA], s.q_norm) @ s.q_b.double().t()).unflatten(1, (-1, NOPE + PE))
    q = torch.cat([q[..., :NOPE], turned(s, q[..., NOPE:])], 2)
    latent = normed(low[:, Q_LORA:Q_LORA + LATENT], s.kv_norm)
    return q, torch.cat([latent, turned(s, low[:, None, Q_LORA + LATENT:])[:, 0]], 1)


def stored_as(form, numbers, kv_scale):
    """The latents `numbers` [pages, page, 576] in a cache's form, converted 65,536 rows at a
    time."""
    rows = numbers.flatten(0, 1)
    return torch.cat([cached(form, part[:, :LATENT], part[:, LATENT:], kv_scale) for part in rows.split(1 << 16)]).view(
        *numbers.shape[:2], -1)


def layer(H, B, L, form, scaled):
    """A decode step of a layer's attention, hidden [B, 7168] to [B, 7168], over contexts of L
    tokens, with H heads on this rank."""
    blocks = L // MLA.page

    def make():
        s = layer_weights(H)
        s.form = form
        s.kv_scale = torch.tensor([0.02], device="cuda") if form == "e4m3" else None
        s.exact_kc, s.exact_vc = s.w_kc, s.w_vc
        if scaled:
            s.w_kc, s.kc_scale, s.exact_kc = in_e4m3(s.w_kc, scaled)
            s.w_vc, s.vc_scale, s.exact_vc = in_e4m3(s.w_vc, scaled)
        s.plain_kc, s.plain_vc = (w.to(torch.bfloat16) for w in (s.exact_kc, s.exact_vc))
        s.hidden = rand(B, HIDDEN)
        s.table = torch.randperm(B * blocks, device="cuda").to(torch.int32).view(B, blocks)
        numbers = big_rand(B * blocks, MLA.page, MLA.width, dtype=torch.bfloat16)
        s.cache = numbers if form == "bf16" else stored_as(form, numbers, s.kv_scale)
        s.lengths = torch.full((B,), L, device="cuda", dtype=torch.int32)
        s.positions = s.lengths - 1
        s.slots = s.table[:, -1] * MLA.page + MLA.page - 1
        s.places = s.slots.long()
        s.attended = torch.empty(B, 1, H, MLA.values, device="cuda", dtype=torch.bfloat16)
        s.q_scale = torch.tensor([1 / 16], device="cuda")
        if form == "token656":
            tokens = s.table.long()[:, :, None] * MLA.page + torch.arange(MLA.page, device="cuda")
            s.tokens = tokens.view(B, 1, L).to(torch.int32)
        return s

    def reference(s, rows):
        q, latent = projected(s, s.hidden[:rows].double())
        heads = []
        for b in range(rows):
            pages = s.cache[s.table[b].long()]
            keys = pages.flatten(0, 1).double() if form == "bf16" else latents(pages, form, s.kv_scale)
            keys[-1] = latent[b]
            wide = torch.cat([torch.bmm(q[b, :, None, :NOPE], s.exact_kc.double().transpose(1, 2))[:, 0],
                              q[b, :, NOPE:]], 1)
            a = torch.softmax(s.scale * wide @ keys.t(), 1) @ keys[:, :LATENT]
            heads.append(torch.bmm(a[:, None], s.exact_vc.double().transpose(1, 2)).flatten())
        return (torch.stack(heads) @ s.o_proj.double().t(),)

    one = make()
    read = nbytes(one.qkv_a, one.q_b, one.w_kc, one.w_vc, one.o_proj)
    traffic = read + nbytes(one.cache, one.table, one.hidden) + nbytes(one.hidden)
    sets = [one] + [make() for _ in range(sets_needed(traffic, STATE_FOOTPRINT) - 1)]
    products = sum(w.numel() for w in (one.qkv_a, one.q_b, one.w_kc, one.w_vc, one.o_proj))
    flops = 2 * B * products + 2 * B * H * L * (MLA.width + MLA.values)
    more = (f", cache in {form}" if form != "bf16" else "") + (f", absorbed in e4m3 by {scaled}" if scaled else "")
    # With e4m3 weights q_nope and the attention's latents are rounded into e4m3 too, an error of
    # 2.7e-2 each, and q_nope's passes through the softmax: so the tolerance is 0.12.
    return Case("mla_layer", f"decode H={H} B={B} L={L}{more}", "mla_layer", B, traffic, sets, reference, flops,
                0.12 if scaled else 5e-2)


def prompt(H, lengths, prefix):
    """New tokens of a few requests through the layer, hidden [T, 7168] to [T, 7168]; each request
    has `prefix` cached tokens before them. 96 of the T tokens are compared with float64."""
    N, T = len(lengths), sum(lengths)
    contexts = [prefix + n for n in lengths]
    blocks = [-(-n // MLA.page) for n in contexts]

    def int32(values):
        return torch.tensor(values, device="cuda", dtype=torch.int32)

    def make():
        s = layer_weights(H)
        s.form = "bf16"
        s.hidden = rand(T, HIDDEN)
        order = torch.randperm(sum(blocks)).tolist()
        pages = [[order.pop() for _ in range(n)] for n in blocks]
        s.table = int32([row + [-1] * (max(blocks) - len(row)) for row in pages])
        s.cache = big_rand(sum(blocks), MLA.page, MLA.width, dtype=torch.bfloat16)
        s.lengths = int32(contexts)
        s.starts, s.key_starts = (torch.tensor((0, *n), device="cuda").cumsum(0).to(torch.int32)
                                  for n in (lengths, contexts))
        s.longest, s.longest_keys = max(lengths), max(contexts)
        s.positions = torch.cat([torch.arange(prefix, n) for n in contexts]).to(torch.int32).cuda()
        of_context = [[row[i // MLA.page] * MLA.page + i % MLA.page for i in range(n)] for row, n in zip(pages, contexts)]
        s.context = torch.tensor([place for row in of_context for place in row], device="cuda")
        s.places = torch.tensor([place for row in of_context for place in row[prefix:]], device="cuda")
        s.slots = s.places.to(torch.int32)
        s.tokens = torch.cat([torch.arange(T)[:24], torch.randperm(T)[:48], torch.arange(T)[-24:]]).cuda()
        s.attended = torch.empty(T, H, VALUE, device="cuda", dtype=torch.bfloat16)
        return s

    def reference(s, rows):
        del rows
        q, latent = projected(s, s.hidden.double())
        keys = s.cache.flatten(0, 1).double()
        keys[s.places] = latent
        keys, q = keys[s.context], q[s.tokens]
        row = torch.searchsorted(s.starts, s.tokens.int(), right=True) - 1
        last = s.key_starts[row + 1] - (s.starts[row + 1] - s.tokens - 1)  # behind the last key that a token sees
        key = torch.arange(len(keys), device="cuda")
        unseen = (key[None] < s.key_starts[row][:, None]) | (key[None] >= last[:, None])
        heads = []
        for h in range(H):
            up = s.kv_b[h * (NOPE + VALUE):(h + 1) * (NOPE + VALUE)].double()
            k = torch.cat([keys[:, :LATENT] @ up[:NOPE].t(), keys[:, LATENT:]], 1)
            scores = (s.scale * q[:, h] @ k.t()).masked_fill(unseen, float("-inf"))
            heads.append(torch.softmax(scores, 1) @ (keys[:, :LATENT] @ up[NOPE:].t()))
        return (torch.cat(heads, 1) @ s.o_proj.double().t(),)

    one = make()
    traffic = nbytes(one.qkv_a, one.q_b, one.kv_b, one.o_proj) + 2 * nbytes(one.hidden) + sum(contexts) * MLA.width * 2
    pairs = sum(n * prefix + n * (n + 1) // 2 for n in lengths)
    flops = 2 * T * sum(w.numel() for w in (one.qkv_a, one.q_b, one.o_proj)) + 2 * sum(contexts) * one.kv_b.numel()
    flops += 2 * H * pairs * (NOPE + PE + VALUE)
    sets = [one] + [make() for _ in range(sets_needed(traffic, STATE_FOOTPRINT) - 1)]
    more = f" behind {prefix}" if prefix else ""
    return Case("mla_layer", f"prompt H={H} {lengths_text(lengths)}{more}", "mla_prompt", N, traffic, sets, reference, flops)


def all_cases(quick):
    """(operation, key, maker) of each case, as cases.all_cases() returns them."""
    return [(operation, (key, row), functools.partial(make, *row))
            for operation, key, make, rows, few in (
                ("batched_product", "product", product, PRODUCTS, 2),
                ("batched_product", "scaled_product", scaled_product, SCALED, 1),
                ("latent_cache", "latent_cache", cache_write, WRITES, 1), ("mla_layer", "mla_layer", layer, LAYERS, 1),
                ("mla_layer", "mla_prompt", prompt, PROMPTS, 1))
            for row in (rows[:few] if quick else rows)]


# --- Contestants ----------------------------------------------------------------------------------


def products(contestant):
    """{kind: function(case, loaded) that returns contestants}; `contestant` is peers.Contestant,
    which this module cannot import, since peers imports it."""
    torch_name = f"torch {torch.__version__}"

    def of_product(case, loaded):
        found = []
        ours = loaded.operator("batched_product")

        def view(s, result, rows):
            return (result[:, :rows, :512],)

        if ours is not None:
            found.append(contestant(OURS, lambda s: ours(s.x, s.w), view))
            found.append(contestant(SETTLED, lambda s: ours(s.x, s.w, settled_weights=True), view))
        found.append(contestant(f"{torch_name} bmm, cuBLAS", lambda s: torch.bmm(s.x, s.w.transpose(1, 2)), view))
        # Of these a row's bits do not depend on the batch either: as rows_bits.py finds, and as vLLM promises.
        if "cublas_invariant" in loaded.modules:
            cublas = loaded.modules["cublas_invariant"]
            found.append(contestant(f"cuBLAS {cublas.version} without workspace, found batch-invariant",
                                    lambda s: cublas.bmm(s.x, s.w), view))
        if "vllm_invariant" in loaded.modules:
            vllm = loaded.modules["vllm_invariant"]
            name = f"vLLM {vllm.version} Triton, batch-invariant"
            found.append(contestant(f"{name} bmm", lambda s: vllm.bmm(s.x, s.w.transpose(1, 2)), view))
            if case.sets[0].w.shape[0] == 1:
                found.append(contestant(f"{name} mm", lambda s: vllm.mm(s.x[0], s.w[0].t())[None], view))
        return found

    def of_scaled(case, loaded):
        found = []
        ours = loaded.operator("batched_product")
        for name, settled in ((OURS, False), (SETTLED, True)) if ours is not None else ():
            found.append(contestant(
                name, lambda s, settled=settled: ours(s.x, s.w, x_scale=s.xs, weight_scale=s.ws, settled_weights=settled),
                lambda s, result, rows: (result[:, :rows, :512],)))
        if case.sets[0].w.shape[0] == 1:
            found.append(contestant(
                f"{torch_name} _scaled_mm, cuBLAS",
                lambda s: torch._scaled_mm(s.x[0], s.w[0].t(), s.xs[0, 0], s.ws[0, 0], out_dtype=torch.bfloat16),
                lambda s, result, rows: (result[None, :rows, :512],)))
            if "deep_gemm" in loaded.modules:
                found.append(deep_gemm_product(case, loaded.modules["deep_gemm"]))
        return found

    def deep_gemm_product(case, library):
        """DeepGEMM's product, whose rows' bits do not depend on the batch either. Its scales are of
        blocks, so each set's two are repeated, in the layout that it wants."""
        for s in case.sets:
            (_, M, K), N = s.x.shape, s.w.shape[1]
            s.block_xs = library.aligned(s.xs[0].expand(M, K // 128).contiguous())
            s.block_ws = s.ws[0].expand((N + 127) // 128, K // 128).contiguous()

        def launch(s):
            out = torch.empty(s.x.shape[1], s.w.shape[1], device="cuda", dtype=torch.bfloat16)
            library.product((s.x[0], s.block_xs), (s.w[0], s.block_ws), out)
            return out

        return contestant(f"DeepGEMM {library.version}, batch-invariant", launch,
                          lambda s, result, rows: (result[None, :rows, :512],))

    def of_write(case, loaded):
        def view(s, result, rows):
            stored = s.cache.flatten(0, 1)[s.places[:rows]]
            if s.form == "token656":
                scale = stored[:, 512:528].contiguous().view(torch.float32).double()
                numbers = stored[:, :512].contiguous().view(torch.float8_e4m3fn).double().unflatten(1, (4, 128))
                return result[:rows], (numbers * scale[..., None]).flatten(1)
            return result[:rows], stored[:, :LATENT].double() * (1 if s.kv_scale is None else s.kv_scale.double())

        found = []
        ours = loaded.operator("latent_cache_write")
        if ours is not None:
            found.append(contestant(OURS, lambda s: ours(
                s.latent, s.pe, s.q, s.cache, s.slots, s.positions, s.frequencies, norm=s.norm, eps=EPS,
                kv_scale=s.kv_scale), view))

        def chain(s):
            cosine, sine = angles(s)
            row = cached(s.form, rms_norm(s.latent, s.norm), rotated(s.pe[:, None], cosine, sine)[:, 0], s.kv_scale)
            s.cache.flatten(0, 1).view(torch.uint8)[s.places] = row.view(torch.uint8)
            return rotated(s.q, cosine, sine)

        found.append(contestant(f"{torch_name}, one operator after the other", chain, view))
        if "vllm_cache" in loaded.modules and case.sets[0].form != "token656":  # its kernel writes no such tokens
            found.append(vllm_write(case, loaded.modules["vllm_cache"], view))
        if "flashinfer_rope" in loaded.modules and case.sets[0].form == "e4m3":
            found.append(flashinfer_write(case, loaded.modules["flashinfer_rope"], view))
        return found

    def flashinfer_write(case, flashinfer, view):
        """FlashInfer's rotation and write. It rounds queries into e4m3 in the same launch, the 512
        absorbed columns of each head too, and does no norm: other work, which is timed but is no
        row's peer."""
        pages = len(case.sets[0].cache)

        def int32(x):
            return x.to(torch.int32)

        indices, starts = int32(torch.arange(pages, device="cuda")), int32(torch.arange(pages + 1, device="cuda"))
        nothing = torch.empty(0, device="cuda", dtype=torch.float8_e4m3fn)
        for s in case.sets:  # a page is a request of its own
            T, H = s.q.shape[:2]
            angle = torch.arange(4096, device="cuda")[:, None] * s.frequencies
            s.flashinfer = SimpleNamespace(
                absorbed=big_rand(T, H, LATENT, dtype=torch.bfloat16), normed=rms_norm(s.latent, s.norm)[:, None],
                out=torch.empty(T, H, MLA.width, device="cuda", dtype=torch.float8_e4m3fn),
                turns=torch.cat([torch.cos(angle), torch.sin(angle)], 1), request=int32(s.places // MLA.page),
                place=int32(s.places % MLA.page), kv=1 / float(s.kv_scale))

        def launch(s):
            mine = s.flashinfer
            flashinfer.write(s.q, s.pe[:, None], mine.absorbed, mine.normed, s.q[:0], mine.out[..., LATENT:],
                             mine.out[..., :LATENT], mine.turns, s.positions, nothing, nothing, s.cache[..., :LATENT],
                             s.cache[..., LATENT:], indices, starts, mine.request, mine.place, 0, MLA.page, 1.0, mine.kv,
                             True, False)
            return mine.out[..., LATENT:]

        return contestant(f"FlashInfer {flashinfer.version} CUDA, normed before, and absorbed queries into e4m3", launch,
                          lambda s, result, rows: view(s, result.float(), rows), other_work=True)

    def vllm_write(case, vllm, view):
        """vLLM's norm, then its fused rotation and write. vLLM rotates in place, so each set has
        copies of its queries and keys for it."""
        for s in case.sets:
            angle = torch.arange(4096, device="cuda")[:, None] * s.frequencies
            s.vllm = SimpleNamespace(
                q=torch.empty(*s.q.shape[:2], NOPE + PE, device="cuda", dtype=torch.bfloat16)[..., NOPE:],
                pe=torch.empty_like(s.pe), normed=torch.empty_like(s.latent), positions=s.positions.long(),
                turns=torch.cat([torch.cos(angle), torch.sin(angle)], 1).to(torch.bfloat16),
                scale=s.kv_scale if s.kv_scale is not None else torch.ones(1, device="cuda"))
            s.vllm.q.copy_(s.q)
            s.vllm.pe.copy_(s.pe)

        def prepare(s):
            s.vllm.q.copy_(s.q)
            s.vllm.pe.copy_(s.pe)

        def launch(s):
            mine = s.vllm
            vllm.rms_norm(mine.normed, s.latent, s.norm, EPS)
            vllm.write(mine.positions, mine.q, mine.pe, mine.normed, mine.turns, False, s.places,
                       s.cache if s.form == "bf16" else s.cache.view(torch.uint8),
                       "auto" if s.form == "bf16" else "fp8", mine.scale)
            return mine.q

        return contestant(f"vLLM {vllm.version} CUDA, norm and fused write", launch, view, prepare)

    def view_rows(s, result, rows):
        return (result[:rows],)

    def view_tokens(s, result, rows):
        del rows
        return (result[s.tokens],)

    def ours_of(loaded, more):
        """A call of our operator mla_layer on a set, or None without it; more(s) returns the
        further arguments of a form."""
        ours = loaded.operator("mla_layer")
        return ours and (lambda s: ours(
            s.hidden, s.positions, s.slots, s.cache, s.table, s.lengths, s.qkv_a, s.q_norm, s.q_b, s.kv_norm, s.kv_b,
            s.w_kc, s.w_vc, s.o_proj, s.frequencies, s.scale, kv_scale=s.kv_scale, w_kc_scale=s.kc_scale,
            w_vc_scale=s.vc_scale, **more(s)))

    def begun(s):
        """The part of a layer before its attention, by PyTorch's operators: returns queries [T,
        heads, 192] and their rotated last 64 columns, and writes the new latents into the cache."""
        low = s.hidden @ s.qkv_a.t()
        q = (rms_norm(low[:, :Q_LORA], s.q_norm) @ s.q_b.t()).unflatten(1, (-1, NOPE + PE))
        cosine, sine = angles(s)
        pe = rotated(low[:, None, Q_LORA + LATENT:], cosine, sine)[:, 0]
        row = cached(s.form, rms_norm(low[:, Q_LORA:Q_LORA + LATENT], s.kv_norm), pe, s.kv_scale)
        s.cache.flatten(0, 1).view(torch.uint8)[s.places] = row.view(torch.uint8)
        return q, rotated(q[..., NOPE:], cosine, sine)

    def of_layer(case, loaded):
        one = case.sets[0]
        H = one.w_kc.shape[0]
        found = []
        ours, decode = ours_of(loaded, lambda s: {}), loaded.operator("mla_decode")
        if ours is not None:
            found.append(contestant(OURS, ours, view_rows))
        note = ", absorbed in bf16" if one.kc_scale is not None else ""  # PyTorch has no batched product in e4m3

        def chain(attend):
            def launch(s):
                q, q_pe = begun(s)
                wide = torch.empty(len(q), 1, H, MLA.width, device="cuda", dtype=torch.bfloat16)
                wide[:, 0, :, :LATENT] = torch.bmm(q[..., :NOPE].transpose(0, 1), s.plain_kc.transpose(1, 2)).transpose(0, 1)
                wide[:, 0, :, LATENT:] = q_pe
                a = attend(s, wide)[:, 0]
                heads = torch.bmm(a.transpose(0, 1), s.plain_vc.transpose(1, 2)).transpose(0, 1)
                return heads.reshape(len(q), -1) @ s.o_proj.t()
            return launch

        def flashmla(s, q):
            out, _, *made = loaded.modules["flashmla"].decode(q, s.cache[:, :, None], 512, s.lengths, s.table, s.scale,
                                                              False, *(plan or (None, None)), s.attended)
            plan[:] = made
            return out

        def flashmla_sparse(s, q):
            out, _, *made = loaded.modules["flashmla"].sparse_decode(
                q, s.cache[:, :, None], s.tokens, None, None, *(plan or (None, None)), None, None, None, 512, s.scale,
                s.attended, False)
            plan[:] = made
            return out

        def flashmla_fp8(s, q):
            q8 = (q.float() / s.q_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            return loaded.modules["flashmla_fp8"].decode(q8, s.cache[:, :, None], 512, s.lengths, s.table, s.scale, False,
                                                         *plan, s.q_scale, s.kv_scale)[0]

        plan = []  # FlashMLA's division of the keys: its first call makes it, for caches in e4m3 module.plan()
        name, attend = {"bf16": ("flashmla", flashmla), "token656": ("flashmla", flashmla_sparse),
                        "e4m3": ("flashmla_fp8", flashmla_fp8)}[one.form]
        if name in loaded.modules:
            module = loaded.modules[name]
            if name == "flashmla_fp8":
                plan[:] = module.plan(one.lengths, H, 1)
            found.append(contestant(f"{torch_name} with FlashMLA of vLLM {module.version}{note}", chain(attend), view_rows))
        if decode is not None:
            found.append(contestant(f"{torch_name} with lockstep's mla_decode{note}", chain(
                lambda s, q: decode(q, s.cache, s.table, s.lengths, s.scale, kv_scale=s.kv_scale)[0]), view_rows))
        return found

    def of_prompt(case, loaded):
        one = case.sets[0]
        contexts, prefix = len(one.context), int(one.lengths[0]) - int(one.starts[1])
        found = []
        forms = {"one_shot": dict(capacity=contexts)}
        if prefix:
            of_prefixes = min(CHUNK, prefix * len(one.lengths))
            forms = {"chunked": dict(capacity=of_prefixes, longest_prefix=prefix), **forms}
        for number, (form, plan) in enumerate(forms.items()):
            ours = ours_of(loaded, lambda s, form=form, plan=plan: dict(form=form, query_start_loc=s.starts, **plan))
            if ours is not None:
                found.append(contestant(OURS if number == 0 else f"{OURS}, {form}", ours, view_tokens))

        def chain(attend):
            def launch(s):
                q, q_pe = begun(s)
                context = s.cache.flatten(0, 1)[s.context]
                kv = (context[:, :LATENT] @ s.kv_b.t()).unflatten(1, (-1, NOPE + VALUE))
                k_pe = context[:, None, LATENT:].expand(-1, kv.shape[1], -1)
                a = attend(s, torch.cat([q[..., :NOPE], q_pe], 2), torch.cat([kv[..., :NOPE], k_pe], 2), kv[..., NOPE:])
                return a.flatten(1) @ s.o_proj.t()
            return launch

        if "flash_attention_3" in loaded.modules:
            fa3, nothing = loaded.modules["flash_attention_3"], None

            def attend(s, q, k, v):
                out, *_ = fa3.forward(
                    q, k, v, nothing, nothing, nothing, s.attended, s.starts, s.key_starts, nothing, nothing, nothing,
                    s.longest, s.longest_keys, *[nothing] * 9, s.scale, True, -1, -1, 0.0, True, nothing, 1, nothing, 0,
                    nothing, 1, 0, nothing)
                return out

            found.append(contestant(f"{torch_name} with FlashAttention 3 of vLLM {fa3.version}", chain(attend), view_tokens))
        prefill = loaded.operator("mla_prefill")
        if prefill is not None:
            found.append(contestant(f"{torch_name} with lockstep's mla_prefill", chain(
                lambda s, q, k, v: prefill(q, k, v, s.starts, s.key_starts, s.scale)[0]), view_tokens))
        return found

    return {"product": of_product, "scaled_product": of_scaled, "latent_cache": of_write, "mla_layer": of_layer,
            "mla_prompt": of_prompt}


PEERS_OF = {"product": ("vllm_invariant", "cublas_invariant"), "scaled_product": ("deep_gemm",),
            "latent_cache": ("vllm_cache", "flashinfer_rope"), "mla_layer": ("flashmla", "flashmla_fp8"), "mla_prompt": ("flash_attention_3",)}
NOT_FETCHED = {
    "product": [], "mla_layer": [], "mla_prompt": [], "latent_cache": [],
    "scaled_product": [("FlashInfer", "its bmm_fp8, cuBLAS too, is not staged")],
}
