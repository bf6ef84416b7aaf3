"""What training frameworks save through the mount is whole on the source, and loads again: with the real libraries.

They run in children, so that the tests' own process never holds torch's threads. Without torch these tests are skipped.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from pathlib import Path

import pytest

from turbofs.testing.children import in_child

pytestmark = pytest.mark.mount

LIMIT_S = 100.0


def needs(*modules):
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed here: {', '.join(missing)}")


def save_and_compare(tree, name, save):
    """*save* a folder of that name in a child, which loads it again; then the source holds what the mount shows."""

    def act():
        warnings.simplefilter("ignore")  # the libraries' own
        folder = tree.path / name
        folder.mkdir()
        save(folder)
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    shown = in_child(act, limit_s=LIMIT_S)
    assert shown
    assert {path: len(data) for path, data in tree.stored(name).items()} == {
        path: len(data) for path, data in shown.items()
    }
    assert tree.stored(name) == shown
    return shown


def model_and_optimizer(seed):
    """A model and an Adam that has taken a step, 5 MB together."""
    import torch

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(300, 700), torch.nn.ReLU(), torch.nn.Linear(700, 300))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 300)).sum().backward()
    optimizer.step()
    return model, optimizer


def assert_equal(one, other):
    import torch

    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_equal(value, other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_equal(left, right)
    else:
        assert one == other


@needs("torch")
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_torch_save_loads_again(tree, legacy):
    def save(folder):
        import torch

        for step in (1, 2):  # the second replaces the first, as trainers do
            model, optimizer = model_and_optimizer(step)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            part = folder / "last.pt.part"
            torch.save(state, part, _use_new_zipfile_serialization=not legacy)
            part.replace(folder / "last.pt")
            assert_equal(torch.load(folder / "last.pt", weights_only=True, mmap=not legacy), state)

    assert set(save_and_compare(tree, f"torch-{legacy}", save)) == {"last.pt"}


@needs("torch")
@pytest.mark.parametrize("sync_files", [True, False], ids=["synced", "unsynced"])
def test_distributed_checkpoint_loads_again(tree, sync_files):
    def save(folder):
        import torch.distributed.checkpoint as dcp

        for step in (1, 2):  # over the same names
            model, optimizer = model_and_optimizer(step)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            writer = dcp.FileSystemWriter(folder / "step", sync_files=sync_files, thread_count=2)
            dcp.save(state, storage_writer=writer, no_dist=True)
            empty_model, empty_optimizer = model_and_optimizer(7)
            loaded = {"model": empty_model.state_dict(), "optimizer": empty_optimizer.state_dict()}
            dcp.load(loaded, storage_reader=dcp.FileSystemReader(folder / "step"), no_dist=True)
            assert_equal(loaded, state)

    shown = save_and_compare(tree, f"dcp-{sync_files}", save)
    assert "step/.metadata" in shown
    assert not [name for name in shown if "tmp" in name]


@needs("torch", "safetensors")
def test_safetensors_load_again(tree):
    """The library extends the new file with ftruncate and writes it through a mapping, or in large calls."""

    def save(folder):
        import torch
        from safetensors import safe_open
        from safetensors.torch import load_file, load_model, save_file, save_model

        model, _ = model_and_optimizer(3)
        state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
        for _ in range(2):  # the second over the first
            save_file(state, folder / "state.safetensors", metadata={"format": "pt"})
            assert_equal(load_file(folder / "state.safetensors"), state)
        with safe_open(folder / "state.safetensors", framework="pt") as opened:
            assert torch.equal(opened.get_slice("0.weight")[10:20], state["0.weight"][10:20])
        save_model(model, str(folder / "model.safetensors"))
        other, _ = model_and_optimizer(4)
        load_model(other, folder / "model.safetensors")
        assert_equal(other.state_dict(), model.state_dict())

    assert set(save_and_compare(tree, "safetensors", save)) == {"state.safetensors", "model.safetensors"}


@needs("torch", "tensorboard")
def test_tensorboard_log_reads_again_while_it_grows(tree):
    def save(folder):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from torch.utils.tensorboard import SummaryWriter

        reader = EventAccumulator(str(folder))
        with SummaryWriter(str(folder), max_queue=1) as writer:
            for step in range(60):
                writer.add_scalar("loss", 1 / (step + 1), step)
                if step % 20 == 19:
                    writer.flush()
                    reader.Reload()
                    assert [event.step for event in reader.Scalars("loss")] == list(range(step + 1))
        reader.Reload()
        assert [event.step for event in reader.Scalars("loss")] == list(range(60))

    (name,) = save_and_compare(tree, "tensorboard", save)
    assert Path(name).name.startswith("events.out.tfevents.")
    assert os.path.getsize(tree.path / "tensorboard" / name) > 60 * 30
