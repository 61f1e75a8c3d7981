"""llama.cpp's HTTP server as a process, with its metrics: python tests/llama_server.py FILE.gguf PORT [DFLASH_DRAFTER.gguf]"""

from __future__ import annotations

import sys
import time


def main(file: str, port: str, drafter: str = "") -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = file
    params.model_alias = ["tiny-target"]
    params.hostnames, params.port = ["127.0.0.1"], int(port)
    params.n_parallel = 4
    params.n_ctx = 4 * 512
    params.n_batch = params.n_ubatch = 512
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.fit_params = params.warmup = False
    params.use_jinja = True
    params.endpoint_metrics = True
    params.verbosity = 0
    if drafter:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH]
        draft = params.speculative.draft
        draft.mparams.path = drafter
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main(*sys.argv[1:])
