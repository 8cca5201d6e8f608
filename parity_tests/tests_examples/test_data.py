"""The corpus and the batches: same bytes for everybody, nothing held out is trained."""

import itertools

import numpy as np
import pytest


def test_files_are_split_by_name_and_hashed(corpus):
    assert not set(corpus.train_files) & set(corpus.held_out_files)
    assert len(corpus.train_files) > 5 * len(corpus.held_out_files) > 0
    assert len(corpus.sha256) == 64
    assert len(corpus.train) > 5_000_000 > len(corpus.held_out) > 100_000


def test_the_hash_sees_every_byte_and_name(tmp_path):
    from lm.data import load_corpus

    def write(**files):
        for old in tmp_path.glob("*.py"):
            old.unlink()
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        return load_corpus(tmp_path).sha256

    many = {f"module_{i}": f"x = {i}\n" for i in range(40)}
    base = write(**many)
    assert write(**many) == base
    assert write(**(many | {"module_3": "x = 4\n"})) != base
    assert write(**(many | {"module_3": ""})) != base
    renamed = {name.replace("module_3", "modul_33"): v for name, v in many.items()}
    assert write(**renamed) != base


def test_an_empty_directory_is_named(tmp_path):
    from lm.data import load_corpus

    with pytest.raises(FileNotFoundError, match="holds 0 Python sources"):
        load_corpus(tmp_path)


def test_batches_depend_on_seed_and_step_only(corpus):
    from lm.data import train_batch

    shape = {"batch": 4, "context": 16}
    a = train_batch(corpus, **shape, seed=0, step=3)
    assert a.shape == (4, 17)
    assert a.dtype == np.int32
    np.testing.assert_array_equal(a, train_batch(corpus, **shape, seed=0, step=3))
    assert (a != train_batch(corpus, **shape, seed=0, step=4)).any()
    assert (a != train_batch(corpus, **shape, seed=1, step=3)).any()
    text = corpus.train.tobytes()
    assert all(row.astype(np.uint8).tobytes() in text for row in a)


def test_evaluation_reads_held_out_files_only(corpus):
    from lm.data import eval_batches

    batches = list(eval_batches(corpus, batch=4, context=64, count=3))
    assert [b.shape for b in batches] == [(4, 65)] * 3
    text = corpus.held_out.tobytes()
    rows = [r.astype(np.uint8).tobytes() for r in np.concatenate(batches)]
    assert all(row in text for row in rows)
    assert rows[0] == text[:65]
    assert rows[-1] == text[-65:]


@pytest.mark.parametrize("micros", [1, 2, 5])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_the_schedule_is_one_forward_one_backward(stages, micros):
    from lm.schedule import Op, one_forward_one_backward

    order = one_forward_one_backward(stages, micros)
    place = {op: i for i, op in enumerate(order)}
    assert len(place) == len(order) == 2 * stages * micros
    for s, m in itertools.product(range(stages), range(micros)):
        assert place[Op("forward", s, m)] < place[Op("backward", s, m)]
        if s:
            assert place[Op("forward", s - 1, m)] < place[Op("forward", s, m)]
            assert place[Op("backward", s, m)] < place[Op("backward", s - 1, m)]
    for s in range(stages):
        kinds = [1 if op.kind == "forward" else -1 for op in order if op.stage == s]
        in_flight = np.cumsum(kinds)
        assert in_flight.max() == min(stages - s, micros)
        assert in_flight[-1] == 0
