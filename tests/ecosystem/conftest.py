"""What the libraries are told: no network, no warnings of their own as errors."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
