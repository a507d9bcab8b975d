"""What pyproject.toml cannot say: the recipes, which lie beside the package in a clone, go into it in a wheel."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithRecipes(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "aglite" / "recipes"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree("recipes", target, ignore=shutil.ignore_patterns("__pycache__", "runs"))


setup(cmdclass={"build_py": WithRecipes})
