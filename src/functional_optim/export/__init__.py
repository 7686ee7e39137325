"""Export of an optimizer step as a program that runs without this package."""

from functional_optim.export.step import ExportedStep, export_step

__all__ = ["ExportedStep", "export_step"]
