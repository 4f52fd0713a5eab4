// The model's dense layers on the GPU: simple kernels that do dense.cpp's operations in dense.cpp's order, so that a row's numbers
// are the same bytes on both. Sums over `in` are chains of one thread each, as there; products and sums are rounded one by one (the
// build turns contraction off), and exp is the demo's own; only log, in fp64 before it is rounded, is CUDA's.
// They are not the fastest: a chain waits for itself at every step. Compiled by NVRTC when the demo starts, behind params.h.
// SPDX-License-Identifier: MIT OR Apache-2.0

using namespace demo::cuda;

// e^x as dense.h has it.
__device__ float exp_of(float x) {
  x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
  const float n = x * 1.44269504f + 12582912.0f, k = n - 12582912.0f;
  const float r = x - k * 0.693145752f - k * 1.42860677e-6f;
  float p = r * (1.0f / 5040) + 1.0f / 720;
  p = r * p + 1.0f / 120;
  p = r * p + 1.0f / 24;
  p = r * p + 1.0f / 6;
  p = r * p + 0.5f;
  return (1.0f + (r + r * r * p)) * __int_as_float((__float_as_int(n) - 0x4B400000 + 127) << 23);
}

__device__ float sigmoid(float x) { return 1.0f / (1.0f + exp_of(-x)); }

__device__ unsigned short bf16_of(float x) {
  const unsigned bits = __float_as_uint(x);
  return (unsigned short)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// 1 / sqrt(mean(x^2) + eps), the sum a chain from x[0] on; x's elements lie `stride` apart.
__device__ float norm_scale(const float* x, int stride, int n, float eps) {
  float sum = 0;
#pragma unroll 32
  for (int i = 0; i < n; i++) sum += x[i * stride] * x[i * stride];
  return 1.0f / sqrtf(sum / (float)n + eps);
}

// A block for each token.
extern "C" __global__ void embed(EmbedArgs a) {
  int row, position;
  if (a.tokens > 0) {
    row = blockIdx.x / a.tokens;
    position = a.length[row] - 1 + blockIdx.x % a.tokens;
    if (threadIdx.x == 0) {
      a.token_row[blockIdx.x] = row;
      a.token_position[blockIdx.x] = position;
      if (blockIdx.x % a.tokens == 0 && a.length[row] >= a.end[row]) a.slots[row] = -1;
    }
  } else {
    row = a.token_row[blockIdx.x];
    position = a.token_position[blockIdx.x];
  }
  const int byte = a.text[(long long)row * a.capacity + position];
  for (int i = threadIdx.x; i < a.d; i += blockDim.x) a.h[(long long)blockIdx.x * a.d + i] = a.embedding[byte * a.d + i];
}

// sums[t] += sum over i of x[i][t] w[i], one term after another; the weights of the next terms are on their way together.
template <int SIDE>
__device__ void chains(const float* w, const float* x, int in, float* sums) {
  constexpr int AHEAD = 64;
  int i = 0;
  for (; i + AHEAD <= in; i += AHEAD) {
    float weights[AHEAD];
#pragma unroll
    for (int j = 0; j < AHEAD; j++) weights[j] = w[(i + j) * PANEL_WIDTH];
    __syncwarp();  // keeps the compiler from loading each weight just before its term
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
#pragma unroll
      for (int t = 0; t < SIDE; t++) sums[t] += x[(i + j) * SIDE + t] * weights[j];
    }
  }
#pragma unroll 16
  for (; i < in; i++) {
#pragma unroll
    for (int t = 0; t < SIDE; t++) sums[t] += x[i * SIDE + t] * w[i * PANEL_WIDTH];
  }
}

// Grid: outputs, tokens. A thread has one output of up to four tokens, whose inputs lie in shared memory: [in][4] side by side, or [in]
// of one alone.
extern "C" __global__ void __launch_bounds__(PANEL_WIDTH * PANELS_PER_BLOCK) linear(LinearArgs a) {
  extern __shared__ float4 shared[];
  __shared__ float scales[TOKENS_PER_BLOCK];
  float* x = (float*)shared;
  const int first = blockIdx.y * TOKENS_PER_BLOCK, n = min(TOKENS_PER_BLOCK, a.n_tokens - first);
  const int side = n == 1 ? 1 : TOKENS_PER_BLOCK;
  for (int t = 0; t < side; t++) {
    for (int i = threadIdx.x; i < a.in; i += blockDim.x) {
      x[i * side + t] = t < n ? a.x[(long long)(first + t) * a.x_stride + i] : 0.0f;
    }
  }
  __syncthreads();
  if (a.norm) {
    if (threadIdx.x < n) scales[threadIdx.x] = norm_scale(x + threadIdx.x, side, a.in, a.eps);
    __syncthreads();
    for (int t = 0; t < n; t++) {
      for (int i = threadIdx.x; i < a.in; i += blockDim.x) x[i * side + t] = x[i * side + t] * scales[t] * a.norm[i];
    }
    __syncthreads();
  }
  const int o = blockIdx.x * blockDim.x + threadIdx.x;
  if (o >= a.out) return;
  const float* w = a.panels + (long long)(o / PANEL_WIDTH) * a.in * PANEL_WIDTH + o % PANEL_WIDTH;
  float sums[TOKENS_PER_BLOCK] = {};
  if (n == 1) {
    chains<1>(w, x, a.in, sums);
  } else {
    chains<TOKENS_PER_BLOCK>(w, x, a.in, sums);
  }
#pragma unroll
  for (int t = 0; t < TOKENS_PER_BLOCK; t++) {
    if (t >= n) break;
    float sum = sums[t];
    if (a.bias) {
      sum += a.bias[o];
      sum = sum / (1.0f + exp_of(-sum));
    }
    float* y = &a.y[(long long)(first + t) * a.y_stride + o];
    if (a.add) sum = *y + sum;
    *y = sum;
    const int at = o - a.first_rounded;
    if (at >= 0 && at < a.n_rounded) a.rounded[(long long)(first + t) * a.n_rounded + at] = bf16_of(sum);
  }
}

// A block for each token.
extern "C" __global__ void rms_norm(NormArgs a) {
  extern __shared__ float4 shared[];
  float* x = (float*)shared;
  const long long from = (long long)blockIdx.x * a.d;
  for (int i = threadIdx.x; i < a.d; i += blockDim.x) x[i] = a.x[from + i];
  __syncthreads();
  const float scale = norm_scale(x, 1, a.d, a.eps);  // every thread the same sum
  for (int i = threadIdx.x; i < a.d; i += blockDim.x) a.y[from + i] = x[i] * scale * a.weight[i];
}

// Grid: tokens, heads. A thread for each element of a head.
extern "C" __global__ void gate(GateArgs a) {
  extern __shared__ float4 shared[];
  float* x = (float*)shared;
  const int i = threadIdx.x, at = blockIdx.y * a.dim + i;
  float* y = &a.y[(long long)blockIdx.x * a.heads * a.dim + at];
  x[i] = *y;
  __syncthreads();
  const float normed = x[i] * norm_scale(x, 1, a.dim, a.eps) * a.weight[i];
  const float z = a.z[(long long)blockIdx.x * a.z_stride + at];
  *y = normed * (a.sigmoid_alone ? sigmoid(z) : z * sigmoid(z));
}

// A block for each token.
extern "C" __global__ void append_keys(AttentionArgs a) {
  const float* qkv = a.qkv + (long long)blockIdx.x * a.stride;
  const long long to = ((long long)a.token_row[blockIdx.x] * a.capacity + a.token_position[blockIdx.x]) * a.width;
  for (int i = threadIdx.x; i < a.width; i += blockDim.x) {
    a.keys[to + i] = qkv[a.width + i];
    a.values[to + i] = qkv[2 * a.width + i];
  }
}

// Grid: tokens, heads. softmax(q . k / sqrt(dim)) v over the window; at least `dim` threads.
extern "C" __global__ void attend(AttentionArgs a) {
  extern __shared__ float4 shared[];
  float* scores = (float*)shared;  // [window], then q [dim]
  float* q = scores + a.window;
  __shared__ float largest_of[32];
  __shared__ float total;
  const int position = a.token_position[blockIdx.x], first = max(0, position - a.window + 1), n = position - first + 1;
  const long long cache = ((long long)a.token_row[blockIdx.x] * a.capacity + first) * a.width + blockIdx.y * a.dim;
  const float* keys = a.keys + cache;
  const float* values = a.values + cache;
  for (int i = threadIdx.x; i < a.dim; i += blockDim.x) {
    q[i] = a.qkv[(long long)blockIdx.x * a.stride + blockIdx.y * a.dim + i];
  }
  __syncthreads();
  const float scale = 1.0f / sqrtf((float)a.dim);
  float largest = __int_as_float(0xFF800000);
  for (int j = threadIdx.x; j < n; j += blockDim.x) {
    const float* key = keys + (long long)j * a.width;
    float sums[8] = {};
#pragma unroll 8
    for (int i = 0; i < a.dim; i += 8) {
      const float4 low = *(const float4*)(key + i), high = *(const float4*)(key + i + 4);
      sums[0] += q[i] * low.x;
      sums[1] += q[i + 1] * low.y;
      sums[2] += q[i + 2] * low.z;
      sums[3] += q[i + 3] * low.w;
      sums[4] += q[i + 4] * high.x;
      sums[5] += q[i + 5] * high.y;
      sums[6] += q[i + 6] * high.z;
      sums[7] += q[i + 7] * high.w;
    }
    const float dot = ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
    scores[j] = dot * scale;
    largest = fmaxf(largest, scores[j]);
  }
  for (int far = 16; far > 0; far /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, far));
  if (threadIdx.x % 32 == 0) largest_of[threadIdx.x / 32] = largest;
  __syncthreads();
  for (int i = 0; i < blockDim.x / 32; i++) largest = fmaxf(largest, largest_of[i]);
  for (int j = threadIdx.x; j < n; j += blockDim.x) scores[j] = exp_of(scores[j] - largest);
  __syncthreads();
  // The last warp sums the weights while the first ones sum the values.
  if (threadIdx.x == blockDim.x - 1) {
    float sum = 0;
#pragma unroll 16
    for (int j = 0; j < n; j++) sum += scores[j];
    total = sum;
  }
  float sum = 0;
  if (threadIdx.x < a.dim) {
#pragma unroll 32
    for (int j = 0; j < n; j++) sum += scores[j] * values[(long long)j * a.width + threadIdx.x];
  }
  __syncthreads();
  if (threadIdx.x < a.dim) {
    a.out[(long long)blockIdx.x * a.width + blockIdx.y * a.dim + threadIdx.x] = sum / total;
  }
}

// Grid: rows, halves.
extern "C" __global__ void draft_input(DraftArgs a) {
  extern __shared__ float4 shared[];
  float* x = (float*)shared;
  const int row = blockIdx.x, half = blockIdx.y;
  const int byte = a.text[(long long)row * a.capacity + a.length[row] - 2 + a.i];
  const float* from = half ? a.embedding + byte * a.d : a.s + (long long)row * a.d;
  const float* weight = half ? a.byte_norm : a.state_norm;
  for (int i = threadIdx.x; i < a.d; i += blockDim.x) x[i] = from[i];
  __syncthreads();
  const float scale = norm_scale(x, 1, a.d, a.eps);
  for (int i = threadIdx.x; i < a.d; i += blockDim.x) a.u[((long long)row * 2 + half) * a.d + i] = x[i] * scale * weight[i];
}

__device__ unsigned long long mix(unsigned long long x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// A block of BYTES threads for each row of logits.
extern "C" __global__ void __launch_bounds__(BYTES) sample(SampleArgs a) {
  __shared__ float best[BYTES], second[BYTES];
  __shared__ int place[BYTES];
  const int v = threadIdx.x, row = a.draft ? blockIdx.x : blockIdx.x / a.tokens, length = a.length[row];
  const int position = a.draft ? length - 1 + a.draft : length + blockIdx.x % a.tokens;
  const unsigned long long seed = a.seed[row];
  const unsigned long long base = seed * 0x9E3779B97F4A7C15u + (unsigned long long)position * BYTES;
  const double u = ((double)(mix(base + v) >> 40) + 0.5) / (1 << 24);
  best[v] = a.logits[(long long)blockIdx.x * BYTES + v] / a.temperature + (float)(-log(-log(u)));
  second[v] = __int_as_float(0xFF800000);
  place[v] = v;
  for (int half = BYTES / 2; half > 0; half /= 2) {
    __syncthreads();
    if (v >= half) continue;
    const int w = v + half;
    const bool other = best[w] > best[v] || (best[w] == best[v] && place[w] < place[v]);
    second[v] = other ? fmaxf(best[v], second[w]) : fmaxf(best[w], second[v]);
    if (other) {
      best[v] = best[w];
      place[v] = place[w];
    }
  }
  if (v != 0) return;
  if (!a.draft) {
    a.choice[blockIdx.x] = (unsigned char)place[0];
    a.margin[blockIdx.x] = best[0] - second[0];
    return;
  }
  unsigned char* text = a.text + (long long)row * a.capacity;
  unsigned char guess = (unsigned char)place[0];
  if (a.random) {
    const unsigned long long bits = mix(seed ^ ((unsigned long long)position * 0x9E3779B97F4A7C15u));
    if (!(bits & 1)) guess = text[(bits >> 8) % length];
  }
  text[position] = guess;
}

// A block for each row.
extern "C" __global__ void verify(VerifyArgs a) {
  const int row = blockIdx.x;
  __shared__ int accepted;
  if (a.slots[row] < 0) {
    if (threadIdx.x == 0) a.counts[row] = 0;
    return;
  }
  if (threadIdx.x == 0) {
    const int length = a.length[row], most = min(a.tokens, a.end[row] - length);
    unsigned char* text = a.text + (long long)row * a.capacity + length;
    const unsigned char* choice = a.choice + row * a.tokens;
    int n = 0;
    while (n + 1 < most && choice[n] == text[n]) n++;
    text[n] = choice[n];
    for (int i = 0; i <= n; i++) a.margins[(long long)row * a.capacity + length + i] = a.margin[row * a.tokens + i];
    a.counts[row] = n + 1;
    a.length[row] = length + n + 1;
    atomicAdd(&a.accepted_n[n], 1ull);
    accepted = n;
  }
  __syncthreads();
  const float* hidden = a.hidden + ((long long)row * a.tokens + accepted) * a.d;
  for (int i = threadIdx.x; i < a.d; i += blockDim.x) a.kept[(long long)row * a.d + i] = hidden[i];
}

// A block for each row.
extern "C" __global__ void last_tokens(LastArgs a) {
  const float* from = a.hidden + (long long)a.last[blockIdx.x] * a.d;
  for (int i = threadIdx.x; i < a.d; i += blockDim.x) a.out[(long long)blockIdx.x * a.d + i] = from[i];
}
