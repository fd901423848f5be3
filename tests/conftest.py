"""What holds for every test."""

import torch

# The models are tiny: handing their work to a second thread takes 20 times what it saves.
torch.set_num_threads(1)
