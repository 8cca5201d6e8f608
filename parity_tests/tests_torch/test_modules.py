"""The modules: torch's own layers with FP8 off, the law's borders with FP8 on."""

import functools
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import torch_ref as te
from parity_tests.tests_torch.cases import GAINS, RECIPE, differences, fp8, normal

K, N = 32, 48
BF16 = torch.bfloat16


def make(kind, dtype=BF16, **options):
    torch.manual_seed(0)
    module = {
        "linear": lambda: te.Linear(K, N, params_dtype=dtype, **options),
        "norm": lambda: te.LayerNormLinear(K, N, params_dtype=dtype, **options),
        "mlp": lambda: te.LayerNormMLP(K, N, params_dtype=dtype, **options),
    }[kind]()
    with torch.no_grad():
        for k, p in enumerate(module.parameters()):
            p.add_(0.1 * normal(k, *p.shape).to(dtype))
    return module


def reference(module, x):
    """The composition of torch's own layers."""
    gamma = module.layer_norm_weight + module.zero_centered_gamma
    if module.normalization == "LayerNorm":
        x = F.layer_norm(x, (K,), gamma, module.layer_norm_bias, module.eps)
    else:
        x = F.rms_norm(x, (K,), gamma, module.eps)
    if isinstance(module, te.LayerNormLinear):
        return F.linear(x, module.weight, module.bias)
    h = F.linear(x, module.fc1_weight, module.fc1_bias)
    if module.activation in ("geglu", "reglu", "swiglu"):
        h, gate = h.chunk(2, -1)
    act = {
        "gelu": functools.partial(F.gelu, approximate="tanh"),
        "relu": F.relu,
        "silu": F.silu,
    }
    act |= {"geglu": act["gelu"], "reglu": F.relu, "swiglu": F.silu}
    h = act[module.activation](h)
    if module.activation in ("geglu", "reglu", "swiglu"):
        h = h * gate
    return F.linear(h, module.fc2_weight, module.fc2_bias)


NORMS = ("LayerNorm", "RMSNorm")
ACTIVATIONS = ("gelu", "relu", "silu", "geglu", "reglu", "swiglu")
VARIANTS = [
    ("norm", {"normalization": n, "zero_centered_gamma": z})
    for n, z in itertools.product(NORMS, (False, True))
] + [("mlp", {"normalization": NORMS[k % 2], "activation": a})
     for k, a in enumerate(ACTIVATIONS)]  # fmt: skip
IDS = [f"{k}-{'-'.join(map(str, o.values()))}" for k, o in VARIANTS]


@pytest.mark.bitwise
@pytest.mark.parametrize(("kind", "options"), VARIANTS, ids=IDS)
def test_fp8_off_is_the_composition_of_torch(kind, options):
    module = make(kind, **options)
    before = {n: b.clone() for n, b in module.named_buffers()}
    x = normal(9, 2, 5, K).to(BF16).requires_grad_()
    x2 = x.detach().clone().requires_grad_()
    y, y2 = module(x), reference(module, x2)
    assert torch.equal(y, y2)
    g = normal(8, *y.shape).to(BF16)
    ours = torch.autograd.grad(y, [x, *module.parameters()], g)
    theirs = torch.autograd.grad(y2, [x2, *module.parameters()], g)
    assert all(map(torch.equal, ours, theirs))
    assert all(torch.equal(b, before[n]) for n, b in module.named_buffers())


def cosine(a, b):
    return F.cosine_similarity(a.flatten().float(), b.flatten().float(), dim=0)


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize(("kind", "options"), VARIANTS, ids=IDS)
def test_fp8_is_close_to_high_precision(kind, options, dtype):
    module = make(kind, dtype, **options)
    x = normal(9, 2, 40, K).to(dtype).requires_grad_()
    g = 1e-3 * normal(8, 2, 40, N if kind == "norm" else K).to(dtype)
    for _ in range(2):
        with fp8():
            y = module(x)
        fp8_grads = torch.autograd.grad(y, [x, *module.parameters()], g)
    y2 = module(x)
    grads = torch.autograd.grad(y2, [x, *module.parameters()], g)
    # An E4M3 product errs by 3.7 %, two with a gate between them by 7 %. An E5M2 cast
    # adds 7 % to a gradient, and relu drops or passes whole entries near 0.
    assert cosine(y, y2) > 0.997
    for ours, exact in zip(fp8_grads, grads, strict=True):
        assert ours.dtype == dtype
        assert cosine(ours, exact) > 0.97
    assert not torch.equal(y, y2)


def of_autograd(function, x, *rest):
    """Value and gradients in float64 by autograd."""
    inputs = [t.detach().double().requires_grad_() for t in (x, *rest)]
    y = function(*inputs)
    return y, torch.autograd.grad(y, inputs, normal(7, *y.shape).double())


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivative_of_an_activation(name):
    from torch_ref._modules.functional import Activate, activation

    x = (2 * normal(5, 6, 10)).requires_grad_()
    y = Activate.apply(x, name, torch.float32)
    (dx,) = torch.autograd.grad(y, x, normal(7, *y.shape))
    exact, (exact_dx,) = of_autograd(lambda x: activation(x, name), x)
    torch.testing.assert_close(y, exact.float())
    torch.testing.assert_close(dx, exact_dx.float())


@pytest.mark.parametrize("kind", NORMS)
def test_derivative_of_a_norm(kind):
    from torch_ref._modules.functional import Normalize, normalization

    x, gamma, beta = normal(1, 6, 10) + 1, normal(2, 10), normal(3, 10)
    rest = (gamma, beta) if kind == "LayerNorm" else (gamma,)
    inputs = [t.requires_grad_() for t in (x, *rest)]
    y = Normalize.apply(*inputs, *[None] * (3 - len(inputs)), 1e-3, kind)
    grads = torch.autograd.grad(y, inputs, normal(7, 6, 10))
    exact, exact_grads = of_autograd(
        lambda x, g, b=None: normalization(x, g, b, 1e-3, kind), *inputs
    )
    torch.testing.assert_close(y, exact.float())
    for ours, theirs in zip(grads, exact_grads, strict=True):
        torch.testing.assert_close(ours, theirs.float())


def observed(module):
    return {
        role: state.amax_history[-1].item()
        for role, state in module.scaling_states().items()
    }


def is_bf16(value):
    return torch.tensor(value).bfloat16().float().item() == torch.tensor(value).item()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_which_borders_round(activation):
    """The table of `docs/numerics.md`, 7: amaxes that are no BF16 numbers."""
    module = make("mlp", activation=activation)
    unrounded = {"fc1_input", "fc2_input"}
    if activation in ("gelu", "silu"):
        unrounded.add("fc1_output_grad")
    if activation == "relu":
        # Its values are those of its BF16 input.
        unrounded.remove("fc2_input")
    seen = set()
    for k in range(3):
        x = normal(k, 16, K).to(BF16)
        with fp8():
            y = module(x)
        y.backward(normal(50 + k, 16, K).to(BF16))
        seen |= {role for role, amax in observed(module).items() if not is_bf16(amax)}
    assert seen == unrounded


def test_the_norm_is_quantised_unrounded():
    module = make("norm")
    x = normal(3, 64, K).to(BF16)
    with fp8():
        module(x)
    exact = F.layer_norm(
        x.double(),
        (K,),
        module.layer_norm_weight.double(),
        module.layer_norm_bias.double(),
    )
    amax = exact.abs().max().float()
    assert abs(module.input_amax_history[-1] / amax - 1) < 2.4e-7
    assert not is_bf16(module.input_amax_history[-1].item())


@pytest.mark.bitwise
@pytest.mark.parametrize(("kind", "options"), VARIANTS[::2], ids=IDS[::2])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_modules_equal_plain(kind, options, reentrant):
    runs = []
    for checkpointed in (False, True):
        module, log = make(kind, **options), []
        for k, gain in enumerate(GAINS):
            x = (gain * normal(k, 4, K)).to(BF16).requires_grad_()
            with fp8():
                if checkpointed:
                    y = te.checkpoint(module, x, use_reentrant=reentrant)
                else:
                    y = module(x)
            y.backward(normal(60 + k, *y.shape).to(BF16))
            log += [y, x.grad, *(p.grad.clone() for p in module.parameters())]
            log += [b.clone() for b in module.buffers()]
            module.zero_grad()
        runs.append(log)
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("kind", ["linear", "norm", "mlp"])
@pytest.mark.parametrize("enabled", [True, False])
def test_return_bias(kind, enabled):
    module, other = make(kind, return_bias=True), make(kind)
    x = normal(1, 4, K).to(BF16)
    with fp8(enabled=enabled):
        y, bias = module(x)
        whole = other(x)
    assert cosine(y + bias, whole) > 0.9999
    assert bias is (module.fc2_bias if kind == "mlp" else module.bias)


@pytest.mark.parametrize("kind", ["norm", "mlp"])
@pytest.mark.parametrize("enabled", [True, False])
def test_return_layernorm_output(kind, enabled):
    module = make(kind, return_layernorm_output=True, return_bias=True)
    x = normal(1, 4, K).to(BF16)
    with fp8(enabled=enabled):
        _, _, normed = module(x)
    expected = F.layer_norm(x, (K,), module.layer_norm_weight, module.layer_norm_bias)
    assert normed.dtype == BF16
    assert (normed - expected).abs().max() < 0.05


@pytest.mark.parametrize("kind", ["linear", "norm", "mlp"])
def test_without_bias(kind):
    module = make(kind, bias=False)
    assert not any(
        n.endswith("bias") and "norm" not in n for n, _ in module.named_parameters()
    )
    with fp8():
        y = module(normal(1, 4, K).to(BF16))
    y.sum().backward()


@pytest.mark.parametrize("split", [("a", "b"), {"a": 10, "b_": 38}])
def test_parameters_split_is_one_weight(split):
    whole = te.Linear(K, N, amax_history_len=4)
    parts = te.Linear(K, N, parameters_split=split, amax_history_len=4)
    rows = parts.a_weight.shape[0]
    with torch.no_grad():
        for name in ("weight", "bias"):
            getattr(parts, f"a_{name}").copy_(getattr(whole, name)[:rows])
            getattr(parts, f"b_{name}").copy_(getattr(whole, name)[rows:])
    x = normal(1, 4, K)
    with fp8():
        y, y2 = whole(x), parts(x)
    assert torch.equal(y, y2)
    y.sum().backward()
    y2.sum().backward()
    assert torch.equal(whole.weight.grad[rows:], parts.b_weight.grad)
    assert torch.equal(whole.weight_scale, parts.weight_scale)


@pytest.mark.parametrize("module", [te.LayerNorm, te.RMSNorm])
@pytest.mark.parametrize("centred", [False, True])
def test_norms(module, centred):
    ours = module(K, eps=1e-3, zero_centered_gamma=centred)
    torchs = {te.LayerNorm: nn.LayerNorm, te.RMSNorm: nn.RMSNorm}[module](K, eps=1e-3)
    with torch.no_grad():
        torchs.weight.copy_(normal(1, K))
        ours.weight.copy_(torchs.weight - int(centred))
    x = normal(2, 4, K)
    torch.testing.assert_close(ours(x), torchs(x))
    assert set(ours.state_dict()) == set(torchs.state_dict())


def attention(q, k, v, mask=None, causal=False):
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) / q.shape[-1] ** 0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(mask, -torch.inf)
    return torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), v).flatten(-2)


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_dot_product_attention(layout, checkpointed):
    q, k, v = (normal(i, 6, 2, 4, 8).requires_grad_() for i in range(3))
    padding = torch.zeros(2, 1, 1, 6, dtype=torch.bool)
    padding[1, ..., 4:] = True
    kinds = {
        "no_mask": attention(q, k, v),
        "causal": attention(q, k, v, causal=True),
        "padding": attention(q, k, v, padding),
        "padding_causal": attention(q, k, v, padding, causal=True),
        "arbitrary": attention(q, k, v, padding),
    }
    core = te.DotProductAttention(4, 8, qkv_format=layout)
    swap = (lambda t: t) if layout == "sbhd" else (lambda t: t.transpose(0, 1))
    for kind, expected in kinds.items():
        y = core(
            *map(swap, (q, k, v)),
            padding if "padding" in kind or kind == "arbitrary" else None,
            attn_mask_type=kind,
            checkpoint_core_attention=checkpointed,
        )
        torch.testing.assert_close(swap(y), expected, rtol=1e-4, atol=1e-5)
        ours = torch.autograd.grad(swap(y).sum(), q)
        theirs = torch.autograd.grad(expected.sum(), q, retain_graph=True)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("groups", [None, 2, 1])
def test_fused_and_split_projections_agree(groups):
    """Interleaved rows by head, rows by kind, three weights: one attention."""
    options = {"num_gqa_groups": groups, "attention_dropout": 0.0}
    split = te.MultiheadAttention(K, 4, **options)
    by_kind = te.MultiheadAttention(
        K, 4, fuse_qkv_params=True, qkv_weight_interleaved=False, **options
    )
    by_head = te.MultiheadAttention(K, 4, fuse_qkv_params=True, **options)
    n = groups or 4
    d = K // 4
    with torch.no_grad():
        for kind in ("weight", "bias"):
            q, k, v = (
                getattr(split.qkv, f"{part}_{kind}")
                for part in ("query", "key", "value")
            )
            getattr(by_kind.qkv, kind).copy_(torch.cat([q, k, v]))
            q, k, v = (t.view(n, -1, d, *t.shape[1:]) for t in (q, k, v))
            mixed = torch.cat([q, k, v], dim=1).flatten(0, 2)
            getattr(by_head.qkv, kind).copy_(mixed)
        for other in (by_kind, by_head):
            other.proj.load_state_dict(split.proj.state_dict())
    x = normal(1, 6, 2, K)
    y = split(x)
    torch.testing.assert_close(by_kind(x), y)
    torch.testing.assert_close(by_head(x), y)


def layer(**options):
    torch.manual_seed(0)
    return te.TransformerLayer(K, N, 4, amax_history_len=4, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fuse_qkv_params": True, "num_gqa_groups": 2},
        {"normalization": "RMSNorm", "activation": "swiglu", "bias": False},
        {"apply_residual_connection_post_layernorm": True},
        {"attn_input_format": "bshd", "zero_centered_gamma": True},
    ],
    ids=["default", "fused", "llama", "residual", "bshd"],
)
def test_transformer_layer(options):
    module = layer(**options).eval()
    x = normal(1, 6, 2, K).requires_grad_()
    for _ in range(2):
        with fp8():
            y = module(x)
        y.sum().backward()
    exact = module(x)
    assert (y - exact).norm() < 0.05 * exact.norm()
    assert not torch.equal(y, exact)
    scales = [b for n, b in module.named_buffers() if n.endswith("_scale")]
    assert len(scales) == 12
    assert all(s != 1 for s in scales)


def test_transformer_layer_equals_its_parts():
    module = layer(hidden_dropout=0.0, attention_dropout=0.0)
    x = normal(1, 6, 2, K)
    h = x + sum(module.self_attention(x))
    assert torch.equal(module(x), h + sum(module.layernorm_mlp(h)))
    dropped = layer()
    torch.manual_seed(1)
    first = dropped(x)
    assert not torch.equal(first, dropped(x))
    torch.manual_seed(1)
    assert torch.equal(first, dropped(x))


def test_checkpoint_core_attention_is_exact():
    module, x = layer(), normal(1, 6, 2, K).requires_grad_()
    results = []
    for flag in (False, True):
        torch.manual_seed(3)
        y = module(x, checkpoint_core_attention=flag)
        results.append(torch.autograd.grad(y.sum(), [x, *module.parameters()]))
    assert all(map(torch.equal, *results))


def test_microbatches_of_a_transformer_layer():
    """The weight is cast once; the first micro-batch equals an uncached one."""
    module, x = layer().eval(), normal(1, 6, 2, K)
    with torch.no_grad(), fp8():
        plain = module(x)
        first = module(x, is_first_microbatch=True)
        kept = module.layernorm_mlp.weight_cache["fc2_weight"]
        second = module(x, is_first_microbatch=False)
    assert torch.equal(plain, first)
    assert torch.equal(first, second)
    assert module.layernorm_mlp.weight_cache["fc2_weight"] is kept


def test_initialisation_of_transformer_engine():
    module = layer()
    weight = module.layernorm_mlp.fc1_weight
    assert abs(weight.std() / 0.023 - 1) < 0.1
    assert not module.layernorm_mlp.fc1_bias.any()
    custom = layer(init_method=nn.init.zeros_, output_layer_init_method=nn.init.ones_)
    assert not custom.layernorm_mlp.fc1_weight.any()
    assert (custom.self_attention.proj.weight == 1).all()


OPTIONS = {
    "tp_size": ({"tp_size": 2}, r"`tp_size` got 2.*transformer_engine.*Leave it out"),
    "parallel": ({"sequence_parallel": True}, r"`sequence_parallel` got True"),
    "norm": ({"normalization": "BatchNorm"}, r"`normalization` got 'BatchNorm'"),
    "activation": ({"activation": "tanh"}, r"`activation` got 'tanh'; expected one of"),
    "mask": ({"self_attn_mask_type": "odd"}, r"`attn_mask_type` got 'odd'"),
    "format": ({"attn_input_format": "thd"}, r"`qkv_format` got 'thd'"),
    "heads": ({"num_gqa_groups": 3}, r"`num_gqa_groups` got 3; expected a divisor"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_are_not_provided_are_named(name):
    options, message = OPTIONS[name]
    with pytest.raises(ValueError, match=message):
        layer(**options)


def test_other_bad_options():
    with pytest.raises(TypeError, match="unexpected argument `nonsense=1`"):
        te.Linear(2, 2, nonsense=1)
    te.Linear(2, 2, tp_size=1, sequence_parallel=False, ub_name="fc1")
    with pytest.raises(ValueError, match=r"`hidden_size` got 30.*`kv_channels`"):
        te.MultiheadAttention(30, 4)
    with pytest.raises(ValueError, match=r"`parameters_split` got 3 parts for 4 rows"):
        te.Linear(2, 4, parameters_split=("a", "b", "c"))
    with pytest.raises(ValueError, match=r"3 rows in all; expected 4"):
        te.Linear(2, 4, parameters_split={"a": 3})
    core = te.DotProductAttention(1, 4, attn_mask_type="padding")
    q = normal(0, 2, 1, 1, 4)
    with pytest.raises(ValueError, match="`attention_mask` is missing"):
        core(q, q, q)
    with pytest.raises(ValueError, match="`amax_history_len` got 0"):
        te.Linear(2, 2, amax_history_len=0)


def test_dtypes_must_agree():
    module = make("linear", torch.float32)
    before = {n: b.clone() for n, b in module.named_buffers()}
    x = normal(1, 4, K)
    with (
        fp8(),
        pytest.raises(TypeError, match=r"`x` got dtype torch.bfloat16.*float32"),
    ):
        module(x.bfloat16())
    with (
        fp8(),
        pytest.raises(ValueError, match=r"`x` got shape \[4, 31\].*\[..., 32\]"),
    ):
        module(x[:, :31])
    assert all(torch.equal(b, before[n]) for n, b in module.named_buffers())
    with torch.autocast("cpu", dtype=BF16), fp8():
        y = module(x)
    assert y.dtype == BF16
    assert RECIPE.amax_history_len == 4
    assert callable(differences)
