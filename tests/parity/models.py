"""Small real models whose sizes are odd on purpose: hidden 320 and 960 are where careless direct I/O loses data.

``transformers`` is imported by those that need it, so that the others serve where it is not installed.
"""

import itertools
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.support.helpers import Training

VOCABULARY = 311


def tokens(step, *shape, high=VOCABULARY):
    """Random tokens that depend on nothing but the step."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(100 + step))


def floats(step, *shape):
    """Normal numbers that depend on nothing but the step."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(200 + step))


def hugging_face_loss(model, batch):
    """The loss that the model itself computes."""
    return model(**batch).loss


def mean_square(model, batch):
    """Mean of the squared output."""
    return model(batch["x"]).square().mean()


def sines(x, length):
    """A chain, each link of which saves what the one before it gives."""
    for _ in range(length):
        x = x.sin()
    return x


# -- of Hugging Face ---------------------------------------------------------------------------------------------------


def transformer(kind, **config):
    """One of ``transformers``, by the name of its class."""
    import transformers

    made = getattr(transformers, kind)
    return made(made.config_class(**({"vocab_size": VOCABULARY} | config)))


def gpt2(*, hidden=320, heads=5, layers=2, dropout=0.0, **extra):
    """GPT-2, its head tied to its embedding."""
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = {"n_embd": hidden, "n_head": heads, "n_layer": layers, "n_positions": 64, "use_cache": False}
    return transformer("GPT2LMHeadModel", bos_token_id=0, eos_token_id=0, **dropouts, **config, **extra)


def causal_batch(step):
    """Tokens and labels for a causal model."""
    ids = tokens(step, 3, 37)
    return {"input_ids": ids, "labels": ids}


def masked_batch(step):
    """With a padding mask that grows."""
    ids = tokens(step, 3, 29)
    mask = torch.ones_like(ids)
    mask[:, 20 + step :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def translated_batch(step):
    """Of one length to another."""
    return {"input_ids": tokens(step, 2, 31), "labels": tokens(step + 50, 2, 13)}


def gpt2_training(**settings):
    """GPT-2; ``settings`` go to :func:`gpt2` (model) or to :class:`Training` (the rest)."""
    training = {name: settings.pop(name) for name in list(settings) if name in Training.__dataclass_fields__}
    return Training(lambda: gpt2(**settings), causal_batch, hugging_face_loss, **training)


def _hugging_face(kind, make_batch, **config):
    return lambda: Training(partial(transformer, kind, **config), make_batch, hugging_face_loss)


LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 5, "hidden_size": 320, "intermediate_size": 520}
bert_training = _hugging_face("BertForMaskedLM", masked_batch, max_position_embeddings=64, **LAYERS)
"""BERT with its dropout on and a padding mask."""
llama_training = _hugging_face(
    "LlamaForCausalLM",
    causal_batch,
    **(LAYERS | {"num_attention_heads": 8, "intermediate_size": 472}),
    num_key_value_heads=2,
    max_position_embeddings=64,
    use_cache=False,
)
"""Llama with grouped queries: 8 heads share 2 keys and values."""
t5_training = _hugging_face(
    "T5ForConditionalGeneration",
    translated_batch,
    d_model=320,
    d_kv=40,
    d_ff=520,
    num_layers=2,
    num_heads=8,
    decoder_start_token_id=0,
    pad_token_id=0,
    eos_token_id=1,
    use_cache=False,
)
"""T5: encoder, decoder, cross attention, relative positions, dropout."""


# -- of PyTorch alone --------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """A residual block as in ResNet, with an in-place ReLU."""

    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.body(x)
        y += x
        return self.activation(y)


def convolution_training():
    """A small ResNet in channels-last."""

    def model():
        return nn.Sequential(
            nn.Conv2d(3, 20, 7, stride=2, padding=3),
            nn.MaxPool2d(3, stride=2, padding=1),
            Residual(20),
            Residual(20),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(20, 11),
        ).to(memory_format=torch.channels_last)

    def batch(step):
        return {"x": floats(step, 4, 3, 45, 45).contiguous(memory_format=torch.channels_last)}

    return Training(model, batch, mean_square)


class Recurrent(nn.Module):
    """Two LSTM layers and a head."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(23, 67, num_layers=2, batch_first=True, dropout=0.25, bidirectional=True)
        self.head = nn.Linear(134, 5)

    def forward(self, x):
        y, _ = self.lstm(x)
        return self.head(y)


def lstm_training():
    """An LSTM with dropout, both directions."""
    return Training(Recurrent, lambda step: {"x": floats(step, 5, 19, 23)}, mean_square)


CHECKPOINTS = {
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]),
    },
}


class Perceptrons(nn.Module):
    """Residual blocks, each checkpointed or not; ``depth(step)`` of them run."""

    def __init__(self, *, width=40, num_blocks=4, mode="none", dropout=0.0):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 3 * width),
                nn.GELU(),
                nn.Dropout(dropout),
                nn.Linear(3 * width, width),
            )
            for _ in range(num_blocks)
        )
        self.mode = mode

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            if self.mode == "none" or (self.mode == "alternate" and number % 2):
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, **CHECKPOINTS.get(self.mode, CHECKPOINTS["non-reentrant"]))
        return x


def inputs(step):
    """For :class:`Perceptrons`."""
    return {"x": floats(step, 6, 17, 40)}


def perceptrons(**settings):
    """A training of :class:`Perceptrons`."""
    return Training(lambda: Perceptrons(**settings), inputs, mean_square)


def checkpointed(mode):
    """Blocks that the model checkpoints by itself."""
    # Re-entrant checkpointing trains nothing unless an input of the block requires gradients.
    return replace(
        perceptrons(mode=mode, dropout=0.2), make_batch=lambda step: {"x": inputs(step)["x"].requires_grad_()}
    )


class Tied(nn.Module):
    """Uses one weight in three ways."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 40)
        self.body = Perceptrons(num_blocks=2, dropout=dropout)
        self.head = nn.Linear(40, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        hidden = self.body(self.embedding(x))
        # The same weight once more, through views that are not the parameter object.
        return self.head(hidden) + hidden @ self.embedding.weight.t()[:, :VOCABULARY]


class Jumping(Perceptrons):
    """Other blocks in another order in each step: what earlier steps taught the prefetcher is wrong."""

    def forward(self, x):
        order = itertools.islice(itertools.cycle(range(4)), x.shape[1] % 4, x.shape[1] % 4 + x.shape[0] % 4 + 1)
        for number in order:
            x = x + self.blocks[number](x)
        return x


class InPlace(nn.Module):
    """In-place activations and views."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(40, 120)
        self.last = nn.Linear(40, 40)

    def forward(self, x):
        gate, value, rest = self.first(x).relu_().chunk(3, dim=-1)
        mixed = gate.sigmoid() * value + rest.transpose(0, 1).contiguous().transpose(0, 1)
        mixed[..., :5] *= 2
        return self.last(mixed.masked_fill(mixed > 1, 0.5))


# -- parts that are frozen ---------------------------------------------------------------------------------------------


class Corrected(nn.Module):
    """A frozen layer with a trained correction of low rank, as in LoRA, whatever its input's last dimension means."""

    def __init__(self, frozen, sizes, rank=8):
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(sizes[0], rank, bias=False)
        self.up = nn.Linear(rank, sizes[1], bias=False)

    @property
    def weight(self):
        """That of the layer, whose type T5 looks at."""
        return self.frozen.weight

    def forward(self, x):
        y = self.frozen(x)
        if x.dim() == 4:  # channels are the second dimension of images
            correction = self.up(self.down(x.movedim(1, -1))).movedim(-1, 1)
            return y + nn.functional.adaptive_avg_pool2d(correction, y.shape[-2:])
        return y + self.up(self.down(x)) * 0.5


def _sizes_of(layer):
    """What a layer takes and gives, if it can be corrected."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    if isinstance(layer, nn.Conv2d):
        return layer.in_channels, layer.out_channels
    if type(layer).__name__ == "Conv1D":  # of transformers: a linear layer, transposed
        return layer.weight.shape[0], layer.weight.shape[1]
    return None


def adapted(model):
    """Everything frozen; linear layers and convolutions get corrections."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            sizes = _sizes_of(layer)
            if sizes is not None and not isinstance(parent, Corrected):
                setattr(parent, name, Corrected(layer, sizes))
    return model


def headed(model):
    """All but the last module with parameters is frozen. A head that is tied to an embedding trains that, too."""
    model.requires_grad_(False)
    last = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))][-1]
    last.requires_grad_(True)
    return model


def half_frozen(model):
    """The first two blocks are."""
    model.get_submodule("blocks")[:2].requires_grad_(False)
    return model


sgd = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
FAMILIES = {
    "gpt2": gpt2_training,
    "gpt2-eager-attention-dropout": lambda: gpt2_training(hidden=40, dropout=0.1, attn_implementation="eager"),
    "gpt2-960": lambda: gpt2_training(hidden=960, heads=15, layers=1, steps=2),
    "bert": bert_training,
    "t5": lambda: replace(t5_training(), make_optimizer=partial(torch.optim.Adafactor, lr=1e-2)),
    "llama-grouped-queries": llama_training,
    "convolutions-channels-last": lambda: replace(convolution_training(), make_optimizer=sgd),
    "lstm": lstm_training,
}
"""The model families that people train."""
TRAININGS = FAMILIES | {
    "autocast": lambda: gpt2_training(hidden=40, dropout=0.1, autocast=torch.bfloat16),
    "accumulation": lambda: gpt2_training(hidden=40, dropout=0.1, num_micro_batches=3),
    "dropout": lambda: perceptrons(dropout=0.3),
    "frozen-blocks": lambda: replace(perceptrons(dropout=0.1), prepare=half_frozen, make_optimizer=sgd),
    "frozen-bert": lambda: replace(bert_training(), prepare=headed),
    "adapters-gpt2": lambda: gpt2_training(hidden=40, dropout=0.1, prepare=adapted),
    "adapters-llama": lambda: replace(llama_training(), prepare=adapted),
    "tied": lambda: Training(Tied, lambda step: {"x": tokens(step, 4, 21)}, mean_square),
    "jumping": lambda: Training(
        Jumping, lambda step: {"x": floats(step, 1 + step % 5, 9 + 7 * (step % 3), 40)}, mean_square, steps=12
    ),
    "in-place": lambda: Training(InPlace, inputs, mean_square),
    **{f"checkpointed-{mode}": partial(checkpointed, mode) for mode in ("reentrant", "non-reentrant", "alternate")},
}
"""And the ways in which they do."""
