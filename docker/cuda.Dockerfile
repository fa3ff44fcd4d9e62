# CUDA image: DeepSpeed's ops, apex and flash-attn built ahead of time for A100 and H100; nothing compiles at run time.
# Not built by our tests: they have no container engine. The versions below are pins, not measurements.
#
#   docker build -f docker/cuda.Dockerfile -t megatron-port:cuda .                       (an hour or more)
#   docker run --rm --gpus all --ipc=host megatron-port:cuda make gpu-check
#
# The base must have the CUDA version of torch's build (torch 2.13.0 from PyPI: 13.0), or DeepSpeed refuses to build.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
ARG ARCHS="8.0;9.0"
ARG MAX_JOBS=8
ARG APEX_COMMIT=6424da3b4faa6c8f062da4a48c424fff3f02d42d
ARG FLASH_ATTN=2.8.3.post2
# No GPU is visible while an image is built: the accelerator and the architectures must be named.
ENV DEBIAN_FRONTEND=noninteractive DEVICE=cuda DS_ACCELERATOR=cuda TORCH_CUDA_ARCH_LIST=${ARCHS} CUDA_HOME=/usr/local/cuda
RUN apt-get update \
 && apt-get install -y --no-install-recommends git make g++ python3-dev python3-venv ca-certificates \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/megatron-port
COPY Makefile pyproject.toml README.md LICENSE ./
COPY constraints constraints
COPY scripts scripts
RUN mkdir -p megatron_port && touch megatron_port/__init__.py && make setup DEVICE=cuda
ENV PATH=/opt/megatron-port/.venv/bin:${PATH}
# apex: fused norms, FusedAdam, multi-tensor ops. PyPI's package of that name is another one.
RUN git clone https://github.com/NVIDIA/apex /opt/src/apex && git -C /opt/src/apex checkout ${APEX_COMMIT} \
 && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 MAX_JOBS=${MAX_JOBS} \
    python -m pip install -v --no-cache-dir --no-build-isolation --no-deps /opt/src/apex && rm -rf /opt/src/apex \
 && python -c "import torch, amp_C, fused_layer_norm_cuda"
# flash-attn: 72 files, 4 to 6 GB of memory each; lower MAX_JOBS where memory is short.
RUN FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTN_CUDA_ARCHS=80\;90 MAX_JOBS=${MAX_JOBS} \
    python -m pip install -v --no-cache-dir --no-build-isolation --no-deps --no-binary flash-attn flash-attn==${FLASH_ATTN} \
 && python -c "import torch, flash_attn_2_cuda"
COPY . .
RUN make setup DEVICE=cuda
# Our own kernels are built here once kernels/ has them (README, "Not yet").
CMD ["megatron-port", "doctor"]
