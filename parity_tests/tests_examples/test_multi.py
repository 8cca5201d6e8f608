"""Several devices against one, on eight host devices and four gloo processes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def tiny(**changes):
    from lm.config import PRESETS, ModelConfig

    model = ModelConfig(depth=1, width=32, heads=4, context=16)
    base = {"model": model, "stages": 1, "micro_batches": 1, "batch": 8, "steps": 12}
    base |= {"accumulation": "exact"}
    return dataclasses.replace(PRESETS["tiny"], **base | changes)


def failed(checks):
    return [check for check in checks if not check.ok]


@pytest.mark.slow
@pytest.mark.bitwise
@pytest.mark.usefixtures("promotion")
def test_meshes_train_as_one_device(corpus):
    from lm.config import Policy
    from lm.multi_jax import Layout, run_layouts

    results = run_layouts(
        tiny(), Policy.FULL, list(Layout), jax.devices()[:8], corpus, measure=False
    )
    meshes = {}
    for name, report, checks in results:
        assert not failed(checks), name
        assert len(checks) == 5
        assert all(step["share"] == 0 for step in report["lockstep"])
        meshes[name] = report["mesh"]
        np.testing.assert_allclose(
            report["losses"], report["reference_losses"], rtol=1e-3
        )
    assert meshes == {
        "jax-data-8": {"data": 8, "model": 1},
        "jax-fsdp-8": {"data": 8, "model": 1},
        "jax-tensor-8": {"data": 2, "model": 4},
    }


@pytest.mark.slow
@pytest.mark.bitwise
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_ranks_train_as_one_process(tmp_path, wrapper, use_reentrant):
    from lm.multi_torch import Job, Wrapper
    from lm.ranks_torch import reference, run_ranks

    job = Job(
        config=tiny(),
        wrapper=Wrapper(wrapper),
        use_reentrant=use_reentrant,
        world=4,
        cuda=False,
        directory=tmp_path,
    )
    reference(job)
    report, checks = run_ranks(job)
    assert not failed(checks)
    assert report["amax_reductions"] == 2  # one block, one backward
    assert report["amax_reductions_outer"] == 2
    assert all(step["share"] == 0 for step in report["lockstep"])
    np.testing.assert_allclose(report["losses"], report["reference_losses"], rtol=1e-3)


def test_the_layouts_shard_what_they_say():
    from lm.multi_jax import Layout, make_mesh, shard_state

    state = {
        "variables": {
            "params": {
                "qkv": {"kernel": jnp.zeros((32, 96)), "bias": jnp.zeros(96)},
                "fc2": {"kernel": jnp.zeros((128, 32)), "bias": jnp.zeros(32)},
            },
            "fp8_scaling": {"qkv": {"amax_history": jnp.zeros(8)}},
        },
        "count": jnp.zeros((), jnp.int32),
    }

    def specs(layout, heads):
        mesh = make_mesh(layout, jax.devices()[:8], heads)
        found = jax.tree.map(lambda s: s.spec, shard_state(layout, mesh, state))
        return found["variables"]["params"], found

    params, _ = specs(Layout.DATA, 2)
    assert set(jax.tree.leaves(params)) == {P()}
    params, found = specs(Layout.FSDP, 2)
    assert params["qkv"]["kernel"] == P(None, "data")
    assert params["fc2"]["kernel"] == P("data", None)
    assert found["count"] == P()
    params, found = specs(Layout.TENSOR, 4)
    assert params["qkv"] == {"kernel": P(None, "model"), "bias": P("model")}
    assert params["fc2"] == {"kernel": P("model", None), "bias": P()}
    for layout in Layout:
        scaling = specs(layout, 2)[1]["variables"]["fp8_scaling"]
        assert scaling["qkv"]["amax_history"] == P()


@pytest.mark.parametrize(("reduce", "wanted"), [(jnp.max, 1), (jnp.sum, 0)])
def test_only_maxima_over_devices_are_counted(reduce, wanted):
    from lm.multi_jax import count_amax_reductions

    mesh = Mesh(jax.devices()[:8], ("data",))
    x = jax.device_put(jnp.arange(64.0), NamedSharding(mesh, P("data")))
    hlo = jax.jit(reduce).lower(x).compile().as_text()
    assert "all-reduce" in hlo
    assert count_amax_reductions(hlo) == wanted


def test_checks_can_fail():
    from lm.multi import falling, lockstep_check, scales_moved, states_differ

    one = [np.float32(1.0), np.array([1.0, 2.0, 4.0], np.float32)]
    assert states_differ(one, one) == {"share": 0.0, "largest": 0.0}
    differ = states_differ(one, [one[0], one[1] * np.float32(1 + 2**-23)])
    assert differ["share"] == 0.75
    assert 1e-8 < differ["largest"] < 2e-7
    assert lockstep_check("run", [differ], "split").ok
    assert not lockstep_check("run", [differ], "exact").ok
    assert not lockstep_check("run", [{"share": 0.1, "largest": 0.2}], "split").ok
    assert not scales_moved("run", np.array([2.0, 1.0])).ok
    assert not scales_moved("run", np.array([])).ok
    assert [c.ok for c in falling("run", [3.0, 2.0])] == [True, True]
    assert [c.ok for c in falling("run", [2.0, 3.0])] == [True, False]
    assert not falling("run", [2.0, float("nan")])[0].ok
