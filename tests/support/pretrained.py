"""Folders as `transformers` saves models, so small that a test writes and trains them in a second."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

__all__ = ["save_tiny"]

VOCABULARY, WINDOW, WIDTH, NUM_LAYERS = 512, 64, 64, 3


def save_tiny(kind, folder, *, dtype=torch.float32, max_shard_size="10GB"):
    """Save a "gpt2" (whose head is its embedding) or a "llama" (whose head is its own) with random weights."""
    torch.manual_seed(7)
    if kind == "gpt2":
        sizes = {"n_positions": WINDOW, "n_embd": WIDTH, "n_layer": NUM_LAYERS, "n_head": 2}
        network = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=1, **sizes))
    else:
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": NUM_LAYERS, **heads}
        network = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=WINDOW, **sizes))
    network.to(dtype).save_pretrained(folder, safe_serialization=True, max_shard_size=max_shard_size)
    return network
