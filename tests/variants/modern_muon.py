"""Both together: the encoder of modern.py, with its blocks' matrices trained by muon.py's Muon.

    python tests/variants/modern_muon.py --lr-scale 0.6      # and any other flag but --init
    torchrun --nproc_per_node=2 tests/variants/modern_muon.py --lr-scale 0.6 --out runs/both

To Muon, the gate and the input of feed-forward are two matrices, as Q, K and V are three.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it sets how torch's threads wait

from tests.variants import common, modern, muon


def install():
    """Makes train.py train a Modern with Muon. All other programs refuse its checkpoints."""
    modern.install()
    muon.install()


if __name__ == "__main__":
    install()
    common.main()
