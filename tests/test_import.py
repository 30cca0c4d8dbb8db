"""Heavy modules are imported only when they are used."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "captum", "shap", "matplotlib", "numpy", "scipy", "sklearn", "pandas", "PIL", "rich")


def run_in_new_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300).stdout


def test_import_loads_no_heavy_modules() -> None:
    code = f"import sys, clearhead; print([name for name in {HEAVY} if name in sys.modules])"
    assert run_in_new_process(code).strip() == "[]"


def test_no_model_code_is_imported_until_needed() -> None:
    code = (
        # GenerationMixin of transformers 5.0 imports sklearn, and that imports pandas
        "import sys; from transformers import GenerationMixin; theirs = set(sys.modules)\n"
        "import clearhead; clearhead.load; clearhead.Explainer; clearhead.Method; clearhead.Explanation\n"
        "print([name for name in sys.modules if name.startswith('transformers.models.') and name.count('.') > 2\n"
        "       and 'auto' not in name])\n"
        "names = ('captum', 'shap', 'matplotlib', 'pandas', 'sklearn')\n"
        "print([name for name in names if name in sys.modules and name not in theirs])"
    )
    assert run_in_new_process(code).split() == ["[]", "[]"]


def test_transformers_model_code_is_imported_with_the_first_model() -> None:
    """The import takes two seconds, which method tables, help texts and test collection must not cost."""
    code = (
        "import sys, clearhead; clearhead.load; clearhead.Explainer; clearhead.Method\n"
        "from clearhead.methods import METHOD_REGISTRY; import clearhead.bench, clearhead.probes, clearhead.concepts\n"
        "names = ('transformers.modeling_utils', 'transformers.masking_utils', 'scipy.stats')\n"
        "print(len(METHOD_REGISTRY) > 30, [name for name in names if name in sys.modules])"
    )
    assert run_in_new_process(code).strip() == "True []"


def test_import_is_not_slower_than_torch_and_transformers() -> None:
    clock = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"
    light = float(run_in_new_process(clock.format("import clearhead")))
    heavy = float(run_in_new_process(clock.format("import torch, transformers.configuration_utils")))
    assert light < heavy + 0.5


def test_every_public_name_exists() -> None:
    import clearhead

    for name in clearhead.__all__:
        assert getattr(clearhead, name) is not None and name in dir(clearhead)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        clearhead.nothing  # noqa: B018
