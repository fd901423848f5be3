from collections import Counter
from functools import partial

import lightning
import pytest
import torch
from torch import nn

from lightning_memopt.core.layers import select_layers


class DoubleConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        )


class Down(nn.Module):
    def __init__(self):
        super().__init__()
        self.pool_conv = nn.Sequential(nn.MaxPool2d(2), DoubleConv())


class Up(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 4, 2)
        self.conv = DoubleConv()


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.down1, self.down2, self.down3 = Down(), Down(), Down()
        self.up1, self.up2, self.up3 = Up(), Up(), Up()
        self.head = nn.Conv2d(4, 1, 1)


class FlatUNet(nn.Module):
    """Blocks of one class, of which the one at the bottom has no siblings."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([DoubleConv(), DoubleConv()])
        self.bottom = Down()
        self.up = nn.ModuleList([DoubleConv(), DoubleConv()])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


class Net(nn.Module):
    def __init__(self, depth=2, block=Block):
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([block() for _ in range(depth)])
        self.head = nn.Linear(4, 4)


class Wrapper(nn.Module):
    """Puts a network a level deeper."""

    def __init__(self):
        super().__init__()
        self.net = Net()


class GAN(nn.Module):
    def __init__(self, generator, discriminator):
        super().__init__()
        self.generator = generator
        self.discriminator = discriminator


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 8)
        self.experts = nn.ModuleList([Expert() for _ in range(8)])


class MoELayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)
        self.moe = Experts()


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.key, self.query, self.value = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([Head() for _ in range(4)])
        self.project = nn.Linear(8, 4)


class HeadsLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Heads()
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


class TwoAttentionsLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attention, self.cross_attention = Block(), Block()
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(4), nn.LayerNorm(4), nn.LayerNorm(4)
        self.linear1, self.linear2 = nn.Linear(4, 4), nn.Linear(4, 4)


class AttributeStage(nn.Module):
    """A stage that keeps its blocks as attributes, as those of timm's RegNet do."""

    def __init__(self):
        super().__init__()
        self.b1, self.b2 = Block(), Block()


class DenseBlock(nn.ModuleDict):
    """A container with a forward of its own, as torchvision's `_DenseBlock` is."""

    def __init__(self):
        super().__init__({"layer1": DoubleConv(), "layer2": DoubleConv()})

    def forward(self, x):
        return x


class DenseLayer(nn.Sequential):
    """A block that inherits from a container, as MONAI's dense layers do."""

    def __init__(self):
        super().__init__(
            nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
        )

    def forward(self, x):
        return torch.cat([x, super().forward(x)], 1)


class Reduce(nn.Module):
    """Large enough to be a block, yet few of them stand between the blocks."""

    def __init__(self):
        super().__init__()
        self.norm, self.conv, self.scale = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)


class Stage(nn.Module):
    def __init__(self, depth, reduce):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])
        self.reduce = Reduce() if reduce else None


class NormedStage(Stage):
    """A stage with much beside its blocks, small though it is."""

    def __init__(self):
        super().__init__(2, reduce=False)
        self.norms = nn.ModuleList([nn.LayerNorm(4) for _ in range(6)])


class NormAct(nn.BatchNorm2d):
    """A layer with a child, which makes no block of it, as timm's `BatchNormAct2d` is."""

    def __init__(self):
        super().__init__(4)
        self.act = nn.ReLU()


class Pair(nn.Module):
    """Convolution and norm: a layer rather than a block, until there is nothing larger."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)


class Lit(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.loss = nn.CrossEntropyLoss()


def sequential(*modules):
    return nn.Sequential(*modules, nn.ReLU())


def chosen_classes(model):
    """Return how many modules of each class were chosen, having checked what always holds."""
    names = select_layers(model)
    order = [name for name, _ in model.named_modules()]
    assert names == sorted(set(names), key=order.index)
    assert not any(a != b and b.startswith(f"{a}.") for a in names for b in names)
    return dict(Counter(type(model.get_submodule(name)).__name__ for name in names))


# --- "auto" on the model libraries

TORCHVISION = {
    "resnet18": {"BasicBlock": 8},
    "resnet50": {"Bottleneck": 16},
    "vit_b_16": {"EncoderBlock": 12},
    "swin_t": {"SwinTransformerBlock": 12},
    "swin_v2_t": {"SwinTransformerBlockV2": 12},
    "convnext_tiny": {"CNBlock": 18},
    "efficientnet_b0": {"MBConv": 16},
    "efficientnet_v2_s": {"FusedMBConv": 10, "MBConv": 30},
    "densenet121": {"_DenseLayer": 58},
    "mobilenet_v2": {"InvertedResidual": 17},
    "mobilenet_v3_large": {"InvertedResidual": 15},
    "mnasnet0_5": {"_InvertedResidual": 16},
    "shufflenet_v2_x0_5": {"InvertedResidual": 16},
    "squeezenet1_0": {"Fire": 8},
    "maxvit_t": {"MaxVitLayer": 11},
    "mvit_v2_s": {"MultiscaleBlock": 16},
    "r2plus1d_18": {"BasicBlock": 8},
    "s3d": {"SepInceptionBlock3D": 9},
    "raft_small": {"BottleneckBlock": 12},
    "ssdlite320_mobilenet_v3_large": {"InvertedResidual": 14},
    "fasterrcnn_resnet50_fpn": {"Bottleneck": 16},
    "retinanet_resnet50_fpn": {"Bottleneck": 16},
    "maskrcnn_resnet50_fpn_v2": {"Bottleneck": 16},
    "deeplabv3_resnet50": {"Bottleneck": 16},
    "lraspp_mobilenet_v3_large": {"InvertedResidual": 15},
    "googlenet": {"Inception": 9},
    "inception_v3": {"InceptionA": 3, "InceptionC": 4, "InceptionE": 2},
    "regnet_y_400mf": {"ResBottleneckBlock": 16},
}


def build_torchvision(name):
    options = {}
    if name in ("googlenet", "inception_v3"):
        # Their default initialisation is announced by a warning.
        options["init_weights"] = False
    if any(part in name for part in ("rcnn", "deeplab", "ssd", "retina", "lraspp")):
        options["weights_backbone"] = None
    # RegNet reads numbers out of tensors.
    with torch.device("cpu" if name.startswith("regnet") else "meta"):
        models = pytest.importorskip("torchvision").models
        return models.get_model(name, weights=None, **options)


@pytest.mark.parametrize(("name", "expected"), TORCHVISION.items(), ids=TORCHVISION)
def test_auto_finds_the_blocks_of_torchvision_models(name, expected):
    assert chosen_classes(build_torchvision(name)) == expected


TIMM = {
    "resnet50": {"Bottleneck": 16},
    "regnety_008": {"Bottleneck": 14},
    "convnext_atto": {"ConvNeXtBlock": 12},
    "swin_tiny_patch4_window7_224": {"SwinTransformerBlock": 12},
    "vit_tiny_patch16_224": {"Block": 12},
    "efficientnet_b0": {"InvertedResidual": 15},
    "mixer_s16_224": {"MixerBlock": 8},
    "convmixer_768_32": {"Sequential": 32},
    "efficientformer_l3": {"MetaBlock2d": 22, "MetaBlock1d": 4},
    "coatnet_0_224": {"MbConvBlock": 5, "TransformerBlock2d": 7},
    "mobilevit_s": {"BottleneckBlock": 7, "Block": 9},
    "xcit_nano_12_p16_224": {"XCABlock": 12, "ClassAttentionBlock": 2},
}


@pytest.mark.parametrize(("name", "expected"), TIMM.items(), ids=TIMM)
def test_auto_finds_the_blocks_of_timm_models(name, expected):
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        model = timm.create_model(name)
    assert chosen_classes(model) == expected


TEXT = {"vocab_size": 32, "num_hidden_layers": 4, "hidden_size": 16, "num_attention_heads": 2}
DECODER = {**TEXT, "intermediate_size": 16, "num_key_value_heads": 2}
VISION = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
SPEECH = {"d_model": 48, "encoder_layers": 2, "decoder_layers": 3}
MOE = {**DECODER, "num_hidden_layers": 2}

TRANSFORMERS = {
    "bert": (TEXT, {"BertLayer": 4}),
    "gpt2": ({"vocab_size": 32, "n_layer": 3, "n_embd": 16, "n_head": 2}, {"GPT2Block": 3}),
    "llama": (DECODER, {"LlamaDecoderLayer": 4}),
    "t5": ({"num_layers": 2, "num_decoder_layers": 3}, {"T5Block": 5}),
    "bart": ({**SPEECH, "decoder_ffn_dim": 8}, {"BartEncoderLayer": 2, "BartDecoderLayer": 3}),
    "whisper": (SPEECH, {"WhisperEncoderLayer": 2, "WhisperDecoderLayer": 3}),
    "vit": ({**VISION, "num_hidden_layers": 3}, {"ViTLayer": 3}),
    "swin": ({"embed_dim": 12, "depths": [2, 2, 4, 2]}, {"SwinLayer": 10}),
    "resnet": ({"depths": [2, 2, 2, 2]}, {"ResNetBottleNeckLayer": 8}),
    "convnext": ({"hidden_sizes": [8] * 4, "depths": [2, 2, 2, 2]}, {"ConvNextLayer": 8}),
    "clip": (
        {
            "text_config": {**TEXT, "num_hidden_layers": 3},
            "vision_config": {**VISION, "num_hidden_layers": 4},
        },
        {"CLIPEncoderLayer": 7},
    ),
    "mixtral": (MOE, {"MixtralDecoderLayer": 2}),
    "qwen2_moe": (MOE, {"Qwen2MoeDecoderLayer": 2}),
    "mamba": ({"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 3}, {"MambaBlock": 3}),
    "jamba": (
        {**DECODER, "num_hidden_layers": 32, "use_mamba_kernels": False},
        {"JambaMambaDecoderLayer": 28, "JambaAttentionDecoderLayer": 4},
    ),
}


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_auto_finds_the_blocks_of_transformers_models(kind):
    transformers = pytest.importorskip("transformers")
    options, expected = TRANSFORMERS[kind]
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(
            transformers.AutoConfig.for_model(kind, **options)
        )
    assert chosen_classes(model) == expected


# --- "auto" on models by hand


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (
            partial(nn.Transformer, 8, 2, 2, 3, batch_first=True),
            {"TransformerEncoderLayer": 2} | {"TransformerDecoderLayer": 3},
        ),
        (UNet, {"Down": 3, "Up": 3}),
        (FlatUNet, {"DoubleConv": 5}),
        (partial(Net, 2, MoELayer), {"MoELayer": 2}),
        (partial(Net, 2, HeadsLayer), {"HeadsLayer": 2}),
        (partial(Net, 4, TwoAttentionsLayer), {"TwoAttentionsLayer": 4}),
        (partial(Net, 4, AttributeStage), {"Block": 8}),
        (partial(Net, 3, NormedStage), {"Block": 6}),
        (partial(Net, 4, DenseBlock), {"DoubleConv": 8}),
        (partial(Net, 4, DenseLayer), {"DenseLayer": 4}),
        (partial(Net, 3, Net), {"Block": 6}),
        (partial(Net, 3, Wrapper), {"Block": 6}),
        (partial(Net, 8, Net), {"Net": 8}),
        (lambda: nn.Sequential(Block(), Block()), {"Block": 2}),
        (lambda: GAN(Net(2), UNet()), {"Block": 2, "Down": 3, "Up": 3}),
        (lambda: GAN(Wrapper(), Wrapper()), {"Block": 4}),
        (lambda: GAN(Net(6), Net(3, DenseLayer)), {"Block": 6, "DenseLayer": 3}),
        (lambda: nn.Sequential(Pair(), Pair(), Pair(), Block(), Block()), {"Block": 2}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_auto_finds_the_blocks_of_models_by_hand(build, expected):
    with torch.device("meta"):
        assert chosen_classes(build()) == expected


def test_auto_leaves_out_small_groups_that_stand_between_the_blocks():
    stages = [Stage(depth, reduce) for depth, reduce in ((4, True), (8, True), (4, False))]
    assert chosen_classes(nn.Sequential(*stages)) == {"Block": 16}


def test_auto_keeps_a_small_group_that_stands_among_the_blocks_of_a_container():
    layers = [Reduce() if index % 8 == 7 else Block() for index in range(16)]
    assert chosen_classes(nn.Sequential(*layers)) == {"Block": 14, "Reduce": 2}


def test_auto_takes_plain_sequentials_in_containers_when_there_is_nothing_else():
    model = nn.Module()
    model.stem = nn.Linear(4, 4)
    model.blocks = nn.ModuleList([sequential(nn.Linear(4, 4)) for _ in range(3)])
    model.head = nn.Sequential(nn.Linear(4, 4))
    assert select_layers(model) == ["blocks.0", "blocks.1", "blocks.2"]


def test_auto_opens_sequentials_that_are_stages():
    stages = [nn.Sequential(*[sequential(nn.Linear(4, 4)) for _ in range(2)]) for _ in range(2)]
    assert select_layers(nn.Sequential(*stages)) == ["0.0", "0.1", "1.0", "1.1"]


def test_auto_takes_small_blocks_rather_than_a_side_branch_of_large_ones():
    model = nn.Module()
    model.features = nn.Sequential(*[Pair() for _ in range(8)])
    model.heads = nn.ModuleList([Expert(), Expert()])
    assert chosen_classes(model) == {"Pair": 8, "Expert": 2}


def test_auto_takes_a_block_that_a_container_holds_many_times_once():
    block = Block()
    model = nn.Module()
    model.layers = nn.ModuleList([block] * 6)
    assert select_layers(model) == ["layers.0"]


def test_auto_names_a_shared_block_once_and_first():
    model = Net(3)
    model.again = nn.ModuleList(reversed(model.blocks))
    model.alias = model.blocks
    assert select_layers(model) == ["blocks.0", "blocks.1", "blocks.2"]


def test_auto_sees_no_repetition_in_a_second_name():
    model = nn.Module()
    model.net = model.alias = nn.Sequential(nn.Flatten(), Block())
    with pytest.raises(ValueError, match="found no repeated blocks"):
        select_layers(model)


def test_auto_finds_the_blocks_of_a_model_in_a_lightning_module():
    assert select_layers(Lit(Net(2))) == ["model.blocks.0", "model.blocks.1"]


def test_auto_finds_the_blocks_of_a_compiled_model():
    assert select_layers(torch.compile(Net(2))) == ["_orig_mod.blocks.0", "_orig_mod.blocks.1"]
    assert select_layers(Lit(torch.compile(Net(1, Net)))) == [
        "model._orig_mod.blocks.0.blocks.0",
        "model._orig_mod.blocks.0.blocks.1",
    ]


def test_auto_takes_a_compiled_block_with_its_wrapper():
    model = Net(2)
    model.blocks[0] = torch.compile(model.blocks[0])
    assert select_layers(model) == ["blocks.0", "blocks.1"]


def test_auto_works_with_lazy_modules():
    stack = [nn.Sequential(nn.LazyLinear(4), nn.ReLU()) for _ in range(2)]
    assert select_layers(nn.Sequential(*stack)) == ["0", "1"]


@pytest.mark.parametrize(
    ("name", "children"),
    [("vgg11", "features, avgpool, classifier"), ("ssd300_vgg16", "backbone, .*, transform")],
)
def test_auto_raises_and_names_the_children_where_nothing_repeats(name, children):
    with pytest.raises(ValueError, match=rf'^`layers` "auto" found no .*children {children}\.$'):
        select_layers(build_torchvision(name))


def test_auto_raises_for_a_plain_mlp():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with pytest.raises(
        ValueError, match=r"in Sequential: pass names .* the children 0, 1, 2, 3, 4"
    ):
        select_layers(model)


def test_auto_raises_for_convolutions_and_norms_that_hold_an_activation():
    model = nn.Sequential(nn.Conv2d(4, 4, 3), NormAct(), nn.Conv2d(4, 4, 3), NormAct())
    with pytest.raises(ValueError, match="found no repeated blocks"):
        select_layers(model)


def test_auto_raises_for_a_single_layer():
    with pytest.raises(ValueError, match=r"Linear: pass names .* it has no children"):
        select_layers(nn.Linear(4, 4))


def test_errors_list_a_dozen_children_at_most():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(13)])
    with pytest.raises(ValueError, match=r"children 0, 1, .*, 11, \.\.\.\.$"):
        select_layers(model)


# --- patterns


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("blocks.1", ["blocks.1"]),
        ("blocks.*", ["blocks.0", "blocks.1", "blocks.2"]),
        ("blocks.[02]", ["blocks.0", "blocks.2"]),
        ("blocks.?.mlp", ["blocks.0.mlp", "blocks.1.mlp", "blocks.2.mlp"]),
        ("*.1", ["blocks.1"]),
        ("h*", ["head"]),
        ("Block", ["blocks.0", "blocks.1", "blocks.2"]),
        (["head", "embed"], ["embed", "head"]),
        (["head", "Block"], ["blocks.0", "blocks.1", "blocks.2", "head"]),
        (["head", "auto"], ["blocks.0", "blocks.1", "blocks.2", "head"]),
        (["blocks.1", "blocks.1", "blocks.*"], ["blocks.0", "blocks.1", "blocks.2"]),
    ],
)
def test_patterns_select_names_and_classes_in_order_of_registration(layers, expected):
    assert select_layers(Net(3), layers) == expected


def test_a_star_stays_within_one_part():
    assert "blocks.0.mlp.0" in dict(Net(3).named_modules())
    assert select_layers(Net(3), "*.*.*.0") == [
        "blocks.0.mlp.0",
        "blocks.1.mlp.0",
        "blocks.2.mlp.0",
    ]
    assert select_layers(Net(3), "*") == ["embed", "blocks", "head"]


def test_a_class_name_leaves_out_base_classes_and_subclasses():
    model = nn.Sequential(DenseLayer(), nn.Sequential(nn.Linear(4, 4)))
    assert select_layers(model, "DenseLayer") == ["0"]
    assert select_layers(model, "Sequential") == ["1"]


@pytest.mark.parametrize("layers", [["blocks.0", "blocks.0.mlp"], ["Linear", "Block"]])
def test_only_the_outermost_of_nested_layers_is_returned(layers):
    names = select_layers(Net(2), layers)
    assert "blocks.0" in names
    assert not any(name.startswith("blocks.0.") for name in names)


def test_a_shared_layer_is_outermost_only_where_no_chosen_layer_holds_it():
    model = nn.Module()
    model.first = nn.Linear(4, 4)
    model.second = nn.Sequential(model.first)
    assert select_layers(model, "first") == ["first"]
    assert select_layers(model, "*") == ["second"]


def test_a_second_name_selects_a_layer_by_its_first_name():
    model = nn.Module()
    model.first = model.second = nn.Linear(4, 4)
    assert select_layers(model, "second") == ["first"]


def test_patterns_work_with_and_without_the_prefix_of_a_compiled_model():
    model = torch.compile(Net(2))
    names = ["_orig_mod.blocks.0", "_orig_mod.blocks.1"]
    assert select_layers(model, "blocks.*") == names
    assert select_layers(model, "_orig_mod.blocks.*") == names
    assert select_layers(model, "Block") == names
    assert select_layers(model, "*") == ["_orig_mod.embed", "_orig_mod.blocks", "_orig_mod.head"]


def test_a_compiled_block_is_selected_with_its_wrapper():
    model = Net(2)
    model.blocks[0] = torch.compile(model.blocks[0])
    assert select_layers(model, "blocks.0") == ["blocks.0"]
    assert select_layers(model, "Block") == ["blocks.0", "blocks.1"]
    assert select_layers(model, "blocks.0.mlp") == ["blocks.0._orig_mod.mlp"]


@pytest.mark.parametrize(
    ("layers", "where", "children"),
    [
        ("encoder.layerz.*", "encoder", "layers, norm"),
        ("encoder.layers.*.mlp", r"encoder\.layers\.\*", "self_attn, linear1, .*"),
        ("encoder.norm.weight", r"encoder\.norm", None),
        ("TransformerLayer", "Transformer", "encoder, decoder"),
        ("Transformer", "Transformer", "encoder, decoder"),
        (["encoder.norm", "nothing"], "Transformer", "encoder, decoder"),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_pattern_that_matches_nothing_raises_with_the_names_that_exist(
    layers, where, children, compiled
):
    with torch.device("meta"):
        model = nn.Transformer(8, 2, 2, 1, batch_first=True)
    listed = f"the children {children}" if children else "no children"
    with pytest.raises(ValueError, match=rf"^`layers` must .*, which .*: {where} has {listed}\.$"):
        select_layers(torch.compile(model) if compiled else model, layers)


def test_the_model_itself_is_no_layer():
    with pytest.raises(ValueError, match=r"`layers` must name .* 'Net'"):
        select_layers(Net(2), "Net")


@pytest.mark.parametrize("layers", ["", [], [""], ["head", ""]])
def test_nothing_to_select_raises(layers):
    with pytest.raises(ValueError, match='`layers` must be "auto", names or class names, got'):
        select_layers(Net(2), layers)


@pytest.mark.parametrize("layers", [None, 3, ("head",), ["head", 3], {"head": 1}])
def test_layers_of_a_wrong_type_raise(layers):
    with pytest.raises(TypeError, match="`layers` must be a `str` or a list of `str`, got"):
        select_layers(Net(2), layers)


@pytest.mark.parametrize("layers", ["auto", "blocks.*"])
def test_selecting_changes_nothing_in_the_model(layers):
    model = Net(2)
    before = repr(model), {key: value.clone() for key, value in model.state_dict().items()}
    assert select_layers(model, layers) == ["blocks.0", "blocks.1"]
    assert repr(model) == before[0]
    assert all(torch.equal(value, before[1][key]) for key, value in model.state_dict().items())
