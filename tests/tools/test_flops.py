"""Compares the operations of a model that plan.py counts with those that torch counts."""
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import bert
from tests.tools import plan
from tests.training import losses_of, random_batch


def test_flops_are_those_that_torch_counts():
    config = bert.BertConfig.preset("tiny", 192, dropout=0.0)
    config.feed_forward -= 64                              # no longer 4 D
    model, batch = bert.BertForPreTraining(config), random_batch(192, examples=4, length=32)
    # In this form of attention torch counts every product.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        sum(losses_of(model(batch), batch).values()).backward()
    masked = len(batch.masked_rows) / 4
    ours = 4 * plan.flops_per_example(config, 32, masked)
    nsp = 3 * 4 * 2 * 2 * config.width                     # too few for the plan to count
    counted = counter.get_total_flops() - nsp
    assert counted == ours, f"torch counts {counted}, the plan {ours}"
