"""Both scaling reports say the same of the same state, and refuse what is no state."""

from __future__ import annotations

import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import jax_fp8
import torch_ref
from jax_fp8.report import main as jax_main
from torch_ref.report import main as torch_main

INF = np.float32(np.inf)
ROLES = {"input": "input", "kernel": "weight", "output_grad": "output_grad"}
QUIET = (2.0, [0, 3.0, 224.0])  # one that needs no note


def jax_variables(states, kernel=None):
    layer = {
        role: {"scale": np.float32(scale), "amax_history": np.float32(history)}
        for role, (scale, history) in states.items()
    }
    scaling = {"layer": {**layer, "tap": np.zeros(2, np.float32)}}
    params = {} if kernel is None else {"params": {"layer": {"kernel": kernel}}}
    return {**params, "fp8_scaling": scaling}


def torch_state(states, kernel=None):
    out = {} if kernel is None else {"layer.weight": torch.from_numpy(kernel.T.copy())}
    for role, (scale, history) in states.items():
        out[f"layer.{ROLES[role]}_scale"] = torch.tensor(scale)
        out[f"layer.{ROLES[role]}_amax_history"] = torch.tensor(history)
    return out


def states(**other):
    floats = {role: (s, [float(a) for a in h]) for role, (s, h) in other.items()}
    return dict.fromkeys(ROLES, QUIET) | floats


def kernel(value, share):
    array = np.ones((100, 100), np.float32)
    array.flat[: int(share * array.size)] = value
    return array


@pytest.mark.parametrize(
    ("found", "weight", "role", "note"),
    [
        (states(), None, "input", ""),
        (states(input=(1.0, [0, 0, 0])), None, "input", "never observed"),
        (states(input=(1.0, [0, 3, 2])), None, "input", "the scale never moved from 1"),
        (states(input=(1.0, [0, 224, 3])), None, "input", ""),  # margin 1
        (
            states(input=(2.0, [0, INF, 3])),
            None,
            "input",
            "an amax is infinite: the scale is held",
        ),
        (states(), kernel(1e-5, 0.009), "kernel", ""),
        (states(), kernel(1e-5, 0.02), "kernel", "2.0% underflow to 0"),
        (states(), kernel(0.0, 0.02), "kernel", ""),
        (states(), kernel(231.0, 0.02), "kernel", ""),  # 462 rounds to 448
        (states(), kernel(240.0, 0.0009), "kernel", ""),
        (
            states(),
            kernel(240.0, 0.02),
            "kernel",
            "elements are clipped: the scale has not followed them",
        ),
    ],
)
def test_one_state_gets_one_report(found, weight, role, note):
    ours = jax_fp8.scaling_report(jax_variables(found, weight)).tensors
    theirs = torch_ref.scaling_report(torch_state(found, weight)).tensors
    assert [t.role for t in ours] == list(ROLES)
    numbers = lambda t: (
        t.amax,
        t.scale,
        t.use,
        t.saturated,
        t.underflowed,
        t.history,
        t.note,
    )
    assert list(map(numbers, ours)) == list(map(numbers, theirs))
    assert {t.role: t.note for t in ours if t.note} == ({role: note} if note else {})


def test_json_has_no_infinity():
    found = states(input=(2.0, [0, INF, 3]))
    for report in (
        jax_fp8.scaling_report(jax_variables(found)),
        torch_ref.scaling_report(torch_state(found)),
    ):
        (row, *_) = json.loads(report.to_json(), parse_constant=pytest.fail)
        assert row["amax"] is None
        assert row["history"] == [None, 3.0]
        assert "infinite" in row["note"]


def test_a_plot_of_many_layers_names_some_of_them(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    state = {}
    for k in range(100):
        for name, value in torch_state(states()).items():
            state[name.replace("layer", f"block_{k}.fc1")] = value
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda *args: figures.append(args[0]))
    torch_ref.scaling_report(state).plot(tmp_path / "amax.png")
    (figure,) = figures
    assert [axes.get_title() for axes in figure.axes] == list(ROLES.values())
    assert all(len(axes.lines) == 100 for axes in figure.axes)
    labels = [t.get_text() for t in figure.legends[0].get_texts()]
    assert labels[:2] == ["block_0.fc1", "block_4.fc1"]
    assert len(labels) <= 30


def refused(main, path, capsys):
    with pytest.raises(SystemExit) as stop:
        main([str(path)])
    assert stop.value.code == 2
    return "".join(capsys.readouterr())


def without(tree, name):
    return {key: value for key, value in tree.items() if key != name}


def flat(variables):
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    return {"/".join(k.key for k in path): np.asarray(leaf) for path, leaf in leaves}


GOOD_JAX, GOOD_TORCH = flat(jax_variables(states())), torch_state(states())
AT = "fp8_scaling/layer"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (without(GOOD_JAX, f"{AT}/tap"), "lacks ['layer/tap']"),
        (without(GOOD_JAX, f"{AT}/input/scale"), "lacks ['layer/input/scale']"),
        ({"fp8_scaling/x": np.ones(3)}, "has ['x'], which belong to none"),
        (GOOD_JAX | {"fp8_scaling/x/y": np.ones(3)}, "has ['x/y']"),
        (GOOD_JAX | {f"{AT}/input/scale": np.ones(3, np.float32)}, "shapes (3,) and"),
        (GOOD_JAX | {f"{AT}/input/amax_history": np.ones(4, np.int32)}, "int32"),
        (GOOD_JAX | {f"{AT}/input/scale": np.float32(np.nan)}, "the scale nan"),
        (GOOD_JAX | {f"{AT}/input/scale": np.float32(0)}, "the scale 0.0"),
        (
            GOOD_JAX | {f"{AT}/input/amax_history": np.float32([0, -1, 2])},
            "negative amaxes",
        ),
        (GOOD_JAX | {f"{AT}/tap": np.ones(3, np.float32)}, "`layer/tap` is float32"),
        ({"params/kernel": np.ones(3)}, "its entries are ['params']"),
        ({"_overwrite_with_gradient/l/x": np.ones(3)}, "`fp8.from_flax_fp8_ops`"),
        ({"x": np.array([{}], object)}, "cannot be read as a .npz file"),
    ],
)
def test_a_broken_or_foreign_npz_is_refused(tmp_path, capsys, entries, message):
    np.savez(tmp_path / "c.npz", **entries)
    assert message in refused(jax_main, tmp_path / "c.npz", capsys)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (without(GOOD_TORCH, "layer.input_scale"), "`layer.input_scale`, `layer"),
        (without(GOOD_TORCH, "layer.input_amax_history"), "`layer.input_scale`, `lay"),
        (GOOD_TORCH | {"layer.input_scale": torch.ones(3)}, "torch.float32 [3]"),
        (GOOD_TORCH | {"layer.input_scale": torch.tensor(np.nan)}, "nan"),
        (GOOD_TORCH | {"layer.input_amax_history": "x"}, "'x'"),
        (GOOD_TORCH | {"layer.input_amax_history": torch.ones(3).int()}, "int32 [3]"),
        ({"a._extra_state": torch.ones(2)}, "`torch_ref.from_te_torch`"),
        ({"a.weight": torch.ones(2)}, "its entries are ['a.weight']"),
        (torch.nn.Linear(2, 2), "Save `model.state_dict()`"),
    ],
)
def test_a_broken_or_foreign_torch_file_is_refused(tmp_path, capsys, tree, message):
    torch.save(tree, tmp_path / "c.pt")
    assert message in refused(torch_main, tmp_path / "c.pt", capsys)


@pytest.mark.parametrize("keep", [0, 0.5])
@pytest.mark.parametrize("suffix", ["npz", "pt", "safetensors"])
def test_half_a_file_is_refused(tmp_path, capsys, suffix, keep):
    path = tmp_path / f"c.{suffix}"
    if suffix == "npz":
        np.savez(path, **GOOD_JAX)
    elif suffix == "pt":
        torch.save(GOOD_TORCH, path)
    else:
        pytest.importorskip("safetensors.torch").save_file(GOOD_TORCH, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole))])
    main = jax_main if suffix == "npz" else torch_main
    assert f"`{path}` cannot be read" in refused(main, path, capsys)


def test_orbax_directories(tmp_path, capsys):
    ocp = pytest.importorskip("orbax.checkpoint")
    variables = jax.tree.map(jnp.asarray, jax_variables(states(), kernel(1, 0)))
    item = tmp_path / "step_3" / "state"
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(item, {"opt": jnp.ones(3), "variables": variables})
    for path in (item, item.parent):
        assert jax_main([str(path)]) == 0
        assert str(jax_fp8.scaling_report(variables)) in capsys.readouterr().out
    assert "expected a `_METADATA`" in refused(jax_main, tmp_path, capsys)


class Run:
    def __reduce__(self):
        return print, ("this was run",)


def test_distributed_directories(tmp_path, capsys):
    item = tmp_path / "step_3" / "state"
    state = torch_state(states(), kernel(1, 0))
    optimizer = {"exp_avg": {"layer.weight": torch.ones(3)}, "lr": 0.1}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(
            {"model": state, "optimizer": optimizer}, checkpoint_id=item, no_dist=True
        )
    for path in (item, item.parent):
        assert torch_main([str(path)]) == 0
        assert str(torch_ref.scaling_report(state)) in capsys.readouterr().out
    assert "expected a `.metadata`" in refused(torch_main, tmp_path, capsys)

    (item / ".metadata").write_bytes(pickle.dumps(Run()))
    printed = refused(torch_main, item, capsys)
    assert "names `builtins.print`" in printed
    assert "this was run" not in printed

    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "other", no_dist=True)
    assert "its entries are ['a']" in refused(torch_main, tmp_path / "other", capsys)


def test_the_format_of_the_recipe_decides_how_much_range_gradients_use(
    tmp_path, capsys
):
    np.savez(tmp_path / "c.npz", **GOOD_JAX)
    torch.save(GOOD_TORCH, tmp_path / "c.pt")
    for main, name in ((jax_main, "c.npz"), (torch_main, "c.pt")):
        use = []
        for format in ("HYBRID", "E4M3"):
            main([str(tmp_path / name), "--format", format])
            use.append(capsys.readouterr().out.splitlines()[3].split()[3])
        assert use == ["0.00781", "1"]
