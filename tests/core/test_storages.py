from __future__ import annotations

import copy
import pickle

import pytest
import torch

from lightning_memopt.core.storages import WeakStorage


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_weak_storage_is_itself(copied: object):
    tensor = torch.randn(64)
    references = [WeakStorage(tensor.untyped_storage())]
    # Two that count down one pointer free it twice, which ends the process.
    assert copied(references)[0] is references[0]  # type: ignore[operator]
    assert copied(references[0]) is references[0]  # type: ignore[operator]
    assert not references[0].is_freed
    del tensor
    assert references[0].is_freed


def test_a_weak_storage_can_t_be_pickled():
    reference = WeakStorage(torch.randn(64).untyped_storage())
    with pytest.raises(TypeError, match="can't be pickled"):
        pickle.dumps(reference)
