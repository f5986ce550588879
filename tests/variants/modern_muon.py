"""Both together: the encoder of modern.py, the matrices of its blocks by the optimizer of muon.py.

    python tests/variants/modern_muon.py --lr-scale 0.6      # and any other flag but --init
    torchrun --nproc_per_node=2 tests/variants/modern_muon.py --lr-scale 0.6 --out runs/both

Gate and input of feed-forward are two matrices to Muon, as Q, K and V are three.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it says how torch's threads wait

from tests.variants import common, modern, muon


def install():
    """Makes train.py train a Modern by Muon; no other program takes up its checkpoints."""
    modern.install()
    muon.install()


if __name__ == "__main__":
    install()
    common.main()
