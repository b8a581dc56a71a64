"""Token windows: the same tokens, the same order, in every run and for any number of processes."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from recipes.data import MASK_TOKEN, PAD_TOKEN, SyntheticData, TextData, tokenize
from recipes.mistakes import ConfigMistake
from recipes.models import make_inputs


def test_text_data_comes_from_the_cache_the_second_time(tmp_path):
    data = TextData(cache_dir=str(tmp_path), max_text_bytes=100_000, vocab_size=512, sequence_length=32, batch_size=4)
    data.prepare_data()
    (cached,) = tmp_path.iterdir()
    written_ns = cached.stat().st_mtime_ns
    tokens = data.make_tokens()
    assert cached.stat().st_mtime_ns == written_ns
    assert torch.equal(tokens, tokenize(data.read_text(), 512))
    TextData(cache_dir=str(tmp_path), max_text_bytes=100_000, vocab_size=600).make_tokens()
    assert len(list(tmp_path.iterdir())) == 2


def test_text_data_reads_the_users_file(tmp_path):
    file = tmp_path / "my.txt"
    file.write_text("ein Stück Text. " * 500, encoding="utf-8")
    data = TextData(path=str(file), cache_dir=str(tmp_path), vocab_size=300, sequence_length=8, batch_size=2)
    assert data.read_text() == file.read_text(encoding="utf-8")
    assert next(iter(data.train_dataloader())).shape == (2, 8)
    missing = TextData(path=str(tmp_path / "none.txt"))
    with pytest.raises(ConfigMistake, match=r"data\.path='.*none\.txt' is no file; give a UTF-8 text file"):
        missing.read_text()


def test_text_is_cut_into_the_tokens_of_a_pretrained_model(tmp_path):
    inner = Tokenizer(models.WordLevel({"<end>": 0, "?": 1, "one": 2, "two": 3}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>").save_pretrained(tmp_path / "model")
    file = tmp_path / "my.txt"
    file.write_text("one two\0two three one")
    data = TextData(path=str(file), tokenizer=str(tmp_path / "model"), vocab_size=9, cache_dir=str(tmp_path / "cache"))
    data.prepare_data()
    assert data.make_tokens().tolist() == [2, 3, 0, 3, 1, 2, 0]
    assert data.vocab_size == 4
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("name", "message"), [("none", "is no folder; give a folder with tokenizer.json"), ("", "has no tokenizer that")]
)
def test_a_folder_without_a_tokenizer_is_refused(name, message, tmp_path):
    with pytest.raises(ConfigMistake, match=rf"^data\.tokenizer=.*: {message}"):
        TextData(tokenizer=str(tmp_path / name))


def test_windows_are_shuffled_alike_and_validation_is_apart():
    def make(seed):
        return SyntheticData(
            num_batches=5, vocab_size=64, sequence_length=8, batch_size=4, num_val_batches=2, seed=seed
        )

    first, again = (torch.cat(list(make(1).train_dataloader())) for _ in range(2))
    data = make(1)
    assert torch.equal(first, again)
    assert first.shape == (20, 8)
    assert not torch.equal(first, data.windows[:20])
    assert torch.equal(first.sort(0).values, data.windows[:20].sort(0).values)
    assert torch.equal(torch.cat(list(data.val_dataloader())), data.windows[20:])
    assert not torch.equal(make(2).windows, data.windows)


def test_several_processes_share_one_order(monkeypatch):
    def read(rank, processes):
        monkeypatch.setattr(SyntheticData, "_part", {"num_replicas": processes, "rank": rank})
        data = SyntheticData(num_batches=4, vocab_size=64, sequence_length=8, batch_size=2, seed=1)
        loader = data.train_dataloader()
        return [torch.cat(list(loader)) for _ in range(2)]

    whole, *parts = read(0, 1), read(0, 2), read(1, 2)
    for epoch in range(2):
        assert torch.equal(torch.stack([part[epoch] for part in parts], dim=1).flatten(0, 1), whole[epoch])
    assert not torch.equal(whole[0], whole[1])


def test_too_little_text_and_too_few_tokens_are_refused():
    data = TextData(max_text_bytes=2_000, vocab_size=300, sequence_length=512, batch_size=4, cache_dir="unused")
    data.make_tokens = lambda: tokenize(data.read_text(), 300)
    with pytest.raises(ConfigMistake, match=r"windows of data\.sequence_length=512; .* need 8\. Give more text"):
        data.train_dataloader()
    with pytest.raises(ConfigMistake, match=r"data\.vocab_size=100; allowed: at least 259"):
        tokenize("text", 100)


def test_inputs_and_labels_of_each_objective():
    inputs, labels = make_inputs(torch.tensor([[5, 6, 7, 8]]), "causal")
    assert (inputs["input_ids"].tolist(), labels.tolist()) == ([[5, 6, 7, 8]], [[6, 7, 8, -100]])
    inputs, labels = make_inputs(torch.tensor([[5, 6, 7, 8]]), "seq2seq")
    assert (inputs["input_ids"].tolist(), labels.tolist()) == ([[5, 6]], [[7, 8]])
    assert inputs["decoder_input_ids"].tolist() == [[PAD_TOKEN, 7]]
    tokens = torch.randint(3, 500, (64, 128))
    inputs, labels = make_inputs(tokens, "masked", mask_seed=3)
    hidden = inputs["input_ids"] == MASK_TOKEN
    assert 0.13 < hidden.float().mean() < 0.17
    assert torch.equal(labels[hidden], tokens[hidden])
    assert (labels[~hidden] == -100).all()
    assert not torch.equal(make_inputs(tokens, "masked", mask_seed=4)[1], labels)
