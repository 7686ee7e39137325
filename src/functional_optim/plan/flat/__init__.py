"""Parameters as views of a few flat buffers: what ``bind`` and ZeRO lay out, and step by plans."""
