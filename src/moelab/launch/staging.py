"""Data is there before the ranks start: the corpus is made once, and an unreachable C4 is said at once."""

from __future__ import annotations

from pathlib import Path

from moelab.errors import Refused
from moelab.experiment import Experiment

C4 = "allenai/c4"


def stage_data(experiment: Experiment, *, dataset: Path | None = None, tokenizer: Path | None = None) -> None:
    """Make the experiment's data ready on this machine, or say why it cannot be.

    Args:
        experiment: what will run.
        dataset: local copy of C4, instead of the hub.
        tokenizer: folder of the model's tokenizer, instead of where TorchTitan's script puts it.

    Raises:
        Refused: if C4, or the tokenizer that it needs, cannot be had.
        CorpusError: if the default corpus cannot be made.
    """
    from moelab.model import TOKENIZERS
    from moelab.titan import corpus

    if experiment.dataset == "c4":
        if dataset is None:
            _require_c4()
        elif not dataset.is_dir():
            raise Refused(f"dataset c4 is said to be in {dataset}, which is no folder on this machine")
        folder = str(tokenizer) if tokenizer else TOKENIZERS.get(experiment.model)
        if folder and not Path(folder, "tokenizer.json").exists():
            raise Refused(
                f"dataset c4 with model {experiment.model} needs its tokenizer in {folder}; fetch it with TorchTitan's "
                "scripts/download_hf_assets.py, or use dataset=python"
            )
        if folder:
            return
    corpus.prepare()


def _require_c4() -> None:
    from httpx import HTTPError  # what huggingface_hub 1.x lets through where there is no network
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        HfApi().dataset_info(C4, timeout=10)
    except (HTTPError, HfHubHTTPError, OfflineModeIsEnabled, OSError, ValueError) as error:
        raise Refused(
            f"dataset c4 cannot be reached from here ({type(error).__name__}): it is streamed from {C4} on the "
            "Hugging Face hub. Check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or use dataset=python: no download"
        ) from error
