"""What all tests share: one torch thread each, so that parallel test processes do not fight for cores."""

import torch

torch.set_num_threads(1)
