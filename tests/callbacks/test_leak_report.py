from lightning_memopt.callbacks._leak_report import describe_holders
from lightning_memopt.core.tensor_holders import GrownHolder, Holding


def test_a_key_with_of_in_it_makes_no_global():
    now = Holding("list", tensors=3, bytes=1024)
    text = describe_holders([GrownHolder("model.by[rate of x].kept", now, 1, 512, 0)], 5, [], "")
    assert "held by `model.by[rate of x].kept` (list of" in text


def test_a_global_is_named_with_its_file():
    now = Holding("list", tensors=3, bytes=1024, file="train.py")
    text = describe_holders([GrownHolder("KEPT of train.py", now, 1, 512, 0)], 5, [], "")
    assert "held by global `KEPT` of train.py (list of" in text
