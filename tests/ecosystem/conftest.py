"""Settings of the libraries: no network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
