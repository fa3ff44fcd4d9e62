# ROCm image for MI250X (gfx90a) and MI300 (gfx942): DeepSpeed's ops, ROCm's apex and flash-attn's Composable Kernel
# build, all ahead of time. Not built by our tests: they have neither a container engine nor a ROCm toolchain of this
# version. The versions below are pins, not measurements.
#
#   docker build -f docker/rocm.Dockerfile -t megatron-port:rocm .                       (hours)
#   docker run --rm --device=/dev/kfd --device=/dev/dri --ipc=host megatron-port:rocm megatron-port doctor
#
# On Slingshot the site's libfabric and its RCCL plug-in (aws-ofi-nccl) are bound in from the host.
FROM rocm/dev-ubuntu-24.04:7.2-complete
ARG ARCHS="gfx90a;gfx942"
ARG MAX_JOBS=8
ARG TORCH_VERSION=2.11.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/rocm7.2
ARG APEX_COMMIT=daed85255d51476425080e7e6203f0bee6d7e4cc
ARG FLASH_ATTN_TAG=v2.8.3
# HIP_PLATFORM: where nvcc is also found, hipcc would silently build for NVIDIA.
ENV DEBIAN_FRONTEND=noninteractive DEVICE=rocm DS_ACCELERATOR=cuda HIP_PLATFORM=amd ROCM_HOME=/opt/rocm \
    PYTORCH_ROCM_ARCH=${ARCHS} TORCH_VERSION=${TORCH_VERSION} TORCH_INDEX=${TORCH_INDEX}
RUN apt-get update \
 && apt-get install -y --no-install-recommends git make g++ python3-dev python3-venv ca-certificates \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/megatron-port
COPY Makefile pyproject.toml README.md LICENSE ./
COPY constraints constraints
COPY scripts scripts
RUN mkdir -p megatron_port && touch megatron_port/__init__.py && make setup DEVICE=rocm
ENV PATH=/opt/megatron-port/.venv/bin:${PATH}
RUN git clone --recursive https://github.com/ROCm/apex /opt/src/apex && git -C /opt/src/apex checkout ${APEX_COMMIT} \
 && APEX_BUILD_CPP_OPS=1 APEX_BUILD_CUDA_OPS=1 MAX_JOBS=${MAX_JOBS} \
    python -m pip install -v --no-cache-dir --no-build-isolation --no-deps /opt/src/apex && rm -rf /opt/src/apex \
 && python -c "import torch, amp_C, fused_layer_norm_cuda"
# BUILD_TARGET=rocm without the Triton switch is the Composable Kernel build.
RUN git clone --recursive --branch ${FLASH_ATTN_TAG} https://github.com/Dao-AILab/flash-attention /opt/src/flash \
 && cd /opt/src/flash && BUILD_TARGET=rocm GPU_ARCHS=${ARCHS} FLASH_ATTENTION_FORCE_BUILD=TRUE MAX_JOBS=${MAX_JOBS} \
    python -m pip install -v --no-cache-dir --no-build-isolation --no-deps . && rm -rf /opt/src/flash \
 && python -c "import torch, flash_attn_2_cuda"
COPY . .
RUN make setup DEVICE=rocm
# Our own kernels are hipified and built here once kernels/ has them (README, "Not yet").
CMD ["megatron-port", "doctor"]
