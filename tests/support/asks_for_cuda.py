"""Stands for a package that asks for CUDA as it is imported, as torchao does."""

import os

import torch

_ASKER = os.getpid()

if torch.backends.cuda.is_built():
    torch.cuda.is_available()
else:  # what torch says of a fork then; a build for CPUs never does
    torch.cuda._is_in_bad_fork = lambda: os.getpid() != _ASKER
