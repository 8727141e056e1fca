"""The encoder of `--model random-process`: pictures of random processes, its training on them, and its packaged weights.

    python -m tools.random_process train --device cuda --out build/encoder     # about 12 minutes on an H200
    python -m tools.random_process pack build/encoder                          # src/fedcdp/models/random_process.safetensors
    python -m tools.random_process sheet build/pictures.png                    # some of the pictures, to look at

No real image is used anywhere: every picture is drawn from a random generator with a seed.
"""
