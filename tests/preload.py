"""What the server of ranks imports before it forks them, see tests/ranks.py."""
import contextlib

import sentencepiece
import torch._dynamo             # which every optimizer imports when it is first made: a second

import train

# The asserts of ranks shall show their values, as those of tests do. (Not with each pytest.)
with contextlib.suppress(Exception):
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config
    install_importhook(get_config()).fnpats = ["tests/*.py"]
