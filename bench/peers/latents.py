"""The pipeline of latent attention (DeepSeek-V3's sizes): products, the write into the cache, and a whole decode layer,
beside chains of PyTorch's own operators. Launches are in CUDA graphs, so that eager operators cost no host time."""

from types import SimpleNamespace

import torch

from cases import Case, MLA, STATE_FOOTPRINT, big_rand, nbytes, rand, sets_needed

HIDDEN, Q_LORA, LATENT, PE, NOPE, VALUE = 7168, 1536, 512, 64, 128, 128
EPS = 1e-6
OURS = "lockstep"

# Name, matrices, tokens, rows and columns of the weights.
PRODUCTS = [(name, G, M, N, K) for M in (1, 32, 128) for name, G, N, K in (
    ("qkv_a", 1, Q_LORA + LATENT + PE, HIDDEN), ("q_b", 1, 128 * (NOPE + PE), Q_LORA), ("absorb", 128, LATENT, NOPE),
    ("un-absorb", 128, VALUE, LATENT), ("o_proj", 1, HIDDEN, 128 * VALUE), ("absorb of 16 heads", 16, LATENT, NOPE))]
PRODUCTS += [(name, 1, 4096, N, K) for name, N, K in (("q_b", 128 * (NOPE + PE), Q_LORA), ("kv_b", 128 * 256, LATENT),
                                                      ("o_proj", HIDDEN, 128 * VALUE))]
SCALED = [("absorb", 128, M, LATENT, NOPE) for M in (32, 128)] + [("q_b", 1, M, 128 * (NOPE + PE), Q_LORA) for M in (32, 128)]
WRITES = [(form, H, T) for form in ("bf16", "e4m3", "token656") for H, T in ((128, 32), (128, 4096))]
LAYERS = [(H, B, L) for H in (128, 16) for B in (1, 32, 128) for L in (4096,)]


def product(name, G, M, N, K):
    """x [G, M, K], weight [G, N, K]; the answer is held to float64 in its first rows and columns."""
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
    """The same in e4m3 with one scale for x and one for the weights."""
    def make():
        return SimpleNamespace(x=rand(G, M, K).to(torch.float8_e4m3fn), w=rand(G, N, K).to(torch.float8_e4m3fn),
                               xs=torch.full((1, 1, 1), 0.5, device="cuda"), ws=torch.full((1, 1, 1), 0.25, device="cuda"))

    def reference(s, rows):
        return (torch.bmm(s.x[:, :rows].double(), s.w[:, :512].double().transpose(1, 2)) / 8,)

    one = make()
    traffic = nbytes(one.x, one.w) + G * M * N * 2
    sets = [one] + [make() for _ in range(sets_needed(traffic, STATE_FOOTPRINT) - 1)]
    return Case("batched_product", f"{name} in e4m3: G={G} M={M} N={N} K={K}", "scaled_product", M, traffic, sets,
                reference, G * M * N * K)  # twice the rate


def rms_norm(x, weight):
    """Of rows, in float32, rounded once."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.float()).to(x.dtype)


def rotated(x, cosine, sine):
    """Pairs (2i, 2i + 1) of the last dimension; cosine and sine [T, 1, 32]."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cosine - b * sine, b * cosine + a * sine], -1).flatten(-2).to(x.dtype)


def angles(s, dtype=torch.float32):
    """cosine, sine [T, 1, 32]."""
    angle = s.positions[:, None, None].to(dtype) * s.frequencies.to(dtype)
    return torch.cos(angle), torch.sin(angle)


def cached(form, latent, pe, kv_scale):
    """Rows as the cache holds them."""
    if form == "bf16":
        return torch.cat([latent, pe], 1)
    if form == "e4m3":
        return (torch.cat([latent, pe], 1).float() / kv_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    tiles = latent.float().unflatten(1, (4, 128))
    scale = torch.exp2(torch.ceil(torch.log2((tiles.abs().amax(2) / 448).clamp(min=1e-4))))
    numbers = (tiles / scale[..., None]).to(torch.float8_e4m3fn).flatten(1)
    return torch.cat([numbers.view(torch.uint8), scale.view(torch.uint8), pe.contiguous().view(torch.uint8)], 1)


def cache_write(form, H, T):
    """[latent; k_pe] of T tokens, normed, rotated, and written to places in any order; q_pe [T, H, 64] rotated."""
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


def layer(H, B, L):
    """A decode step of a layer's attention: hidden [B, 7168] to [B, 7168], contexts of L tokens, heads H of a rank."""
    blocks = L // MLA.page

    def weights():
        def draw(*shape):
            return big_rand(*shape, dtype=torch.bfloat16).mul_(shape[-1] ** -0.5)

        s = SimpleNamespace(
            qkv_a=draw(Q_LORA + MLA.width, HIDDEN), q_norm=rand(Q_LORA, scale=0.1) + 1,
            q_b=draw(H * (NOPE + PE), Q_LORA), kv_norm=rand(LATENT, scale=0.1) + 1, kv_b=draw(H * (NOPE + VALUE), LATENT),
            o_proj=draw(HIDDEN, H * VALUE), frequencies=10000 ** (-torch.arange(32, device="cuda") / 32))
        per_head = s.kv_b.view(H, NOPE + VALUE, LATENT)
        s.w_kc, s.w_vc = per_head[:, :NOPE].transpose(1, 2).contiguous(), per_head[:, NOPE:].contiguous()
        return s

    def make():
        s = weights()
        s.hidden = rand(B, HIDDEN)
        s.table = torch.randperm(B * blocks, device="cuda").to(torch.int32).view(B, blocks)
        s.cache = big_rand(B * blocks, MLA.page, MLA.width, dtype=torch.bfloat16)
        s.lengths = torch.full((B,), L, device="cuda", dtype=torch.int32)
        s.positions = s.lengths - 1
        s.slots = s.table[:, -1] * MLA.page + MLA.page - 1
        s.places, s.scale = s.slots.long(), MLA.scale
        s.attended = torch.empty(B, 1, H, MLA.values, device="cuda", dtype=torch.bfloat16)
        return s

    def reference(s, rows):
        x = s.hidden[:rows].double()
        low = x @ s.qkv_a.double().t()

        def normed(y, weight):
            return y * torch.rsqrt(y.square().mean(1, keepdim=True) + EPS) * weight.double()

        q = (normed(low[:, :Q_LORA], s.q_norm) @ s.q_b.double().t()).view(rows, H, NOPE + PE)
        latent = normed(low[:, Q_LORA:Q_LORA + LATENT], s.kv_norm)
        angle = s.positions[:rows, None, None].double() * s.frequencies.double()
        cosine, sine = torch.cos(angle), torch.sin(angle)

        def turn(y):
            a, b = y.unflatten(-1, (-1, 2)).unbind(-1)
            return torch.stack([a * cosine - b * sine, b * cosine + a * sine], -1).flatten(-2)

        q_pe, pe = turn(q[..., NOPE:]), turn(low[:, None, Q_LORA + LATENT:])[:, 0]
        heads = []
        for b in range(rows):
            keys = s.cache[s.table[b].long()].flatten(0, 1).double()
            keys[-1] = torch.cat([latent[b], pe[b]])
            wide = torch.cat([torch.bmm(q[b, :, None, :NOPE], s.w_kc.double().transpose(1, 2))[:, 0], q_pe[b]], 1)
            a = torch.softmax(s.scale * wide @ keys.t(), 1) @ keys[:, :LATENT]
            heads.append(torch.bmm(a[:, None], s.w_vc.double().transpose(1, 2)).flatten())
        return (torch.stack(heads) @ s.o_proj.double().t(),)

    one = make()
    read = nbytes(one.qkv_a, one.q_b, one.w_kc, one.w_vc, one.o_proj)
    traffic = read + nbytes(one.cache, one.table, one.hidden) * 1 + nbytes(one.hidden)
    sets = [one] + [make() for _ in range(sets_needed(traffic, STATE_FOOTPRINT) - 1)]
    flops = 2 * B * (read // 2) + 2 * B * H * L * (MLA.width + MLA.values)
    return Case("mla_layer", f"decode H={H} B={B} L={L}", "mla_layer", B, traffic, sets, reference, flops)


def all_cases(quick):
    """(operation, key, maker) as in cases.all_cases()."""
    found = []
    for row in PRODUCTS[:2] if quick else PRODUCTS:
        found.append(("batched_product", ("product", row), lambda r=row: product(*r)))
    for row in SCALED[:1] if quick else SCALED:
        found.append(("batched_product", ("scaled_product", row), lambda r=row: scaled_product(*r)))
    for row in WRITES[:1] if quick else WRITES:
        found.append(("latent_cache", ("latent_cache", row), lambda r=row: cache_write(*r)))
    for row in LAYERS[:1] if quick else LAYERS:
        found.append(("mla_layer", ("mla_layer", row), lambda r=row: layer(*r)))
    return found


# --- Contestants ----------------------------------------------------------------------------------


def products(contestant):
    """Makers of contestants by kind, of peers.Contestant."""
    torch_name = f"torch {torch.__version__}"

    def of_product(case, loaded):
        del case
        found = []
        ours = loaded.operator("batched_product")

        def view(s, result, rows):
            return (result[:, :rows, :512],)

        if ours is not None:
            found.append(contestant(OURS, lambda s: ours(s.x, s.w), view))
        found.append(contestant(f"{torch_name} bmm, cuBLAS", lambda s: torch.bmm(s.x, s.w.transpose(1, 2)), view))
        return found

    def of_scaled(case, loaded):
        found = []
        ours = loaded.operator("batched_product")
        if ours is not None:
            found.append(contestant(OURS, lambda s: ours(s.x, s.w, x_scale=s.xs, weight_scale=s.ws),
                                    lambda s, result, rows: (result[:, :rows, :512],)))
        if case.sets[0].w.shape[0] == 1:
            found.append(contestant(
                f"{torch_name} _scaled_mm, cuBLAS",
                lambda s: torch._scaled_mm(s.x[0], s.w[0].t(), s.xs[0, 0], s.ws[0, 0], out_dtype=torch.bfloat16),
                lambda s, result, rows: (result[None, :rows, :512],)))
        return found

    def of_write(case, loaded):
        del case

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
        return found

    def of_layer(case, loaded):
        H = case.sets[0].w_kc.shape[0]
        found = []
        ours, decode = loaded.operator("mla_layer"), loaded.operator("mla_decode")

        def view(s, result, rows):
            return (result[:rows],)

        if ours is not None:
            found.append(contestant(OURS, lambda s: ours(
                s.hidden, s.positions, s.slots, s.cache, s.table, s.lengths, s.qkv_a, s.q_norm, s.q_b, s.kv_norm, s.kv_b,
                s.w_kc, s.w_vc, s.o_proj, s.frequencies, s.scale), view))

        def chain(attend):
            def launch(s):
                low = s.hidden @ s.qkv_a.t()
                q = (rms_norm(low[:, :Q_LORA], s.q_norm) @ s.q_b.t()).view(-1, H, NOPE + PE)
                cosine, sine = angles(s)
                pe = rotated(low[:, None, Q_LORA + LATENT:], cosine, sine)[:, 0]
                s.cache.flatten(0, 1)[s.places] = cached("bf16", rms_norm(low[:, Q_LORA:Q_LORA + LATENT], s.kv_norm), pe, None)
                wide = torch.empty(low.shape[0], 1, H, MLA.width, device="cuda", dtype=torch.bfloat16)
                wide[:, 0, :, :LATENT] = torch.bmm(q[..., :NOPE].transpose(0, 1), s.w_kc.transpose(1, 2)).transpose(0, 1)
                wide[:, 0, :, LATENT:] = rotated(q[..., NOPE:], cosine, sine)
                a = attend(s, wide)[:, 0]
                heads = torch.bmm(a.transpose(0, 1), s.w_vc.transpose(1, 2)).transpose(0, 1)
                return heads.reshape(low.shape[0], -1) @ s.o_proj.t()
            return launch

        if "flashmla" in loaded.modules:
            flashmla, plan = loaded.modules["flashmla"], []

            def attend(s, q):
                out, _, parts, splits = flashmla.decode(q, s.cache[:, :, None], 512, s.lengths, s.table, s.scale, False,
                                                        *(plan or (None, None)), s.attended)
                plan[:] = [parts, splits]
                return out

            found.append(contestant(f"{torch_name} with FlashMLA of vLLM {flashmla.version}", chain(attend), view))
        if decode is not None:
            found.append(contestant(f"{torch_name} with lockstep's mla_decode", chain(
                lambda s, q: decode(q, s.cache, s.table, s.lengths, s.scale)[0]), view))
        return found

    return {"product": of_product, "scaled_product": of_scaled, "latent_cache": of_write, "mla_layer": of_layer}


PEERS_OF = {"product": (), "scaled_product": (), "latent_cache": (), "mla_layer": ("flashmla",)}
NOT_FETCHED = {
    "product": [], "mla_layer": [],
    "scaled_product": [("FlashInfer", "its bmm_fp8, cuBLAS too, is not staged")],
    "latent_cache": [("vLLM", "its concat_and_cache_mla is not staged"),
                     ("FlashInfer", "its mla_rope_quantize_fp8 and append_paged_mla_kv_cache are not staged")],
}
