import pytest
import torch

from lightning_memopt.core import precision
from lightning_memopt.core.precision import choose_precision, computes_in_bf16, cpu_flags

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def flags(monkeypatch):
    """Give the CPU features."""
    return lambda *names: monkeypatch.setattr(precision, "cpu_flags", lambda: set(names))


@pytest.fixture
def capability(monkeypatch):
    """Give the GPU a compute capability."""

    def give(*version):
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: version)
        # It counts emulation: a V100 says it supports bf16.
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)

    return give


@pytest.mark.parametrize("flag", ["avx512_bf16", "amx_bf16"])
def test_a_cpu_that_computes_in_bf16_gets_it(flags, flag):
    flags("avx2", flag)
    choice = choose_precision(CPU)
    assert choice.precision == "bf16-mixed"
    assert choice.reason == "cpu computes in bf16"


@pytest.mark.parametrize("others", [(), ("avx2", "avx512f", "avx512_fp16", "amx_int8", "amx_tile")])
def test_a_cpu_that_emulates_bf16_stays_in_fp32_and_hears_why(flags, others):
    flags(*others)
    choice = choose_precision(CPU)
    assert choice.precision == "32-true"
    assert "AVX512-BF16" in choice.reason
    assert "AMX" in choice.reason


@pytest.mark.parametrize("version", [(8, 0), (8, 9), (9, 0), (10, 0)])
def test_a_gpu_from_ampere_on_gets_bf16(capability, version):
    capability(*version)
    assert choose_precision(CUDA).precision == "bf16-mixed"


@pytest.mark.parametrize("version", [(6, 1), (7, 0), (7, 5)])
def test_an_older_gpu_gets_fp16_though_torch_would_emulate_bf16(capability, version):
    capability(*version)
    choice = choose_precision(CUDA)
    assert choice.precision == "16-mixed"
    assert "no bf16" in choice.reason
    assert "scaler" in choice.reason


@pytest.mark.parametrize(("is_supported", "expected"), [(True, "bf16-mixed"), (False, "16-mixed")])
def test_a_rocm_gpu_is_asked_through_torch(monkeypatch, is_supported, expected):
    monkeypatch.setattr(torch.version, "hip", "6.0")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: is_supported)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert choose_precision(CUDA).precision == expected


@pytest.mark.parametrize(("is_supported", "expected"), [(True, "bf16-mixed"), (False, "32-true")])
def test_an_xpu_is_asked_through_torch(monkeypatch, is_supported, expected):
    monkeypatch.setattr(torch.xpu, "is_bf16_supported", lambda: is_supported, raising=False)
    choice = choose_precision(torch.device("xpu"))
    assert choice.precision == expected
    assert choice.reason.startswith("xpu")


@pytest.mark.parametrize(("is_new", "expected"), [(True, "bf16-mixed"), (False, "32-true")])
def test_mps_gets_bf16_from_macos_14_on(monkeypatch, is_new, expected):
    monkeypatch.setattr(
        torch.backends.mps, "is_macos_or_newer", lambda *v: is_new and v == (14, 0), raising=False
    )
    assert choose_precision(torch.device("mps")).precision == expected


def test_a_device_nobody_knows_stays_in_fp32():
    choice = choose_precision(torch.device("meta"))
    assert choice.precision == "32-true"
    assert choice.reason == "meta has no bf16"


def test_features_that_torch_reports_as_missing_are_left_out(monkeypatch):
    found = {"avx2": True, "amx_bf16": False, "architecture": "x86_64"}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    assert cpu_flags() == {"avx2"}
    assert not computes_in_bf16(CPU)


@pytest.fixture
def cpuinfo(monkeypatch):
    """Make an older torch, which doesn't know the features, read this instead."""

    def read(text):
        def answer(path, *_):
            assert str(path) == "/proc/cpuinfo"
            if text is None:
                raise FileNotFoundError(path)
            return text

        monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
        monkeypatch.setattr(precision.Path, "read_text", answer)

    return read


def test_an_older_torch_reads_the_features_from_the_kernel(cpuinfo):
    cpuinfo("processor\t: 0\nflags\t\t: fpu avx2 avx512_bf16\nbugs\t: amx_bf16\n")
    assert cpu_flags() == {":", "fpu", "avx2", "avx512_bf16"}
    assert computes_in_bf16(CPU)


@pytest.mark.parametrize("text", ["processor : 0\nFeatures : fp asimd\n", "", None])
def test_where_the_features_are_unknown_bf16_is_not_chosen(cpuinfo, text):
    cpuinfo(text)
    assert cpu_flags() == set()
    assert choose_precision(CPU).precision == "32-true"
