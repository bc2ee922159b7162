from hc_lens.models.installed import BRIDGES

# With TransformerLens 4 the analysis cannot be imported; tests/hc_lens/models/test_installed.py.
collect_ignore_glob = ["test_*.py"] if BRIDGES else []
