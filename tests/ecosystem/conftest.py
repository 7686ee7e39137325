"""Settings of the libraries: no network, and their own warnings are no errors."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
