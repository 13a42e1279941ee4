// Preparing, rotating and rounding rows to int8 on Hopper GPUs (compute capability 9.0).
//
// This does what the kernel `_round_rows` of kernels.py does, and faster. Its last bits differ,
// because it adds in another order and rotates in fp16. A row is prepared by a layer norm, by exact
// GELU, or not at all. Then every 64 neighbouring numbers are multiplied with Hadamard's matrix, and
// the row is rounded in equal steps.
//
// `_round_rows` multiplies with the matrix: 64 multiplications for each number. Here six additions
// take their place, because Hadamard's matrix is a chain of six "butterflies". Each replaces pairs
// (a, b) by (a + b, a - b). A thread holds 8 neighbouring numbers, so the pairs of the first three
// butterflies lie in one thread, and those of the other three in neighbouring threads.
//
// A NaN or an infinity in a row makes the scale of the row NaN or infinite, and with it the product.
//
// `build_kernels.py` compiles this file into a shared library. `hopper.py` loads it.

#include <cuda_fp16.h>

#include <cstdint>

namespace virnuc_round_rows {

constexpr int kLanes = 32;  // threads of a warp
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarpsPerBlock = 4;
constexpr int kPerLoad = 8;          // fp16 numbers that a thread loads at once: 16 bytes
constexpr int kPairs = kPerLoad / 2;
constexpr float kHalfScale = 0.125f;  // Hadamard's matrix of size 64 is orthogonal if divided by 8
constexpr float kLargestInt8 = 127.0f;
constexpr float kSmallestLargest = 1e-10f;  // a row of zeros must not divide by zero
constexpr float kRounder = 12582912.0f;     // 1.5 * 2 ** 23: see `round_to_int8` of kernels.py

enum Preparation { kNothing = 0, kNorm = 1, kGelu = 2 };  // the numbers are those of hopper.py

// Blocks that must fit on a multiprocessor at the same time. More of them leave fewer registers to a
// thread. Measured on an H200: with more, the norm spills registers.
constexpr int blocks_at_once(int preparation) { return preparation == kNorm ? 4 : 7; }

// 2 ** x, by the GPU's own instruction.
__device__ __forceinline__ float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Exact GELU without a branch; `branchless_gelu` of kernels.py explains the formula. The polynomial
// has the degree 5 in place of 7, and an absolute error of at most 5e-7.
__device__ __forceinline__ float gelu(float x) {
  const float size = fabsf(x);
  float log2_tail = fmaf(-0.00047623756f, size, 0.007101452f);
  log2_tail = fmaf(log2_tail, size, -0.051860932f);
  log2_tail = fmaf(log2_tail, size, -0.4599649f);
  log2_tail = fmaf(log2_tail, size, -1.150797f);
  log2_tail = fmaf(log2_tail, size, -1.0000365f);
  return fmaf(-size, exp2_fast(log2_tail), fmaxf(x, 0.0f));
}

// Returns the sum of one number of each thread of a warp, to all its threads.
__device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

// Applies layer norm to a row that lies in one warp.
template <int kLoads>
__device__ __forceinline__ void normalise(float (&values)[kLoads][kPerLoad], const __half* weight,
                                          const __half* bias, int first_load, float eps) {
  constexpr int kWidth = kLoads * kPerLoad * kLanes;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
#pragma unroll
    for (int j = 0; j < kPerLoad; ++j) sum += values[i][j];
  }
  const float mean = sum_of_warp(sum) / kWidth;
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
#pragma unroll
    for (int j = 0; j < kPerLoad; ++j) {
      values[i][j] -= mean;
      squares = fmaf(values[i][j], values[i][j], squares);
    }
  }
  const float factor = rsqrtf(sum_of_warp(squares) / kWidth + eps);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int load = first_load + i * kLanes;
    const uint4 weights = __ldg(reinterpret_cast<const uint4*>(weight) + load);
    const uint4 biases = __ldg(reinterpret_cast<const uint4*>(bias) + load);
    const __half2* weight_pairs = reinterpret_cast<const __half2*>(&weights);
    const __half2* bias_pairs = reinterpret_cast<const __half2*>(&biases);
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const float2 w = __half22float2(weight_pairs[j]);
      const float2 b = __half22float2(bias_pairs[j]);
      values[i][2 * j] = fmaf(values[i][2 * j] * factor, w.x, b.x);
      values[i][2 * j + 1] = fmaf(values[i][2 * j + 1] * factor, w.y, b.y);
    }
  }
}

// Multiplies blocks of 64 numbers with Hadamard's matrix. Eight neighbouring threads hold a block,
// 8 numbers each. Returns the 8 numbers of this thread as pairs.
__device__ __forceinline__ void rotate(const float (&values)[kPerLoad], __half2 (&pairs)[kPairs],
                                       const __half2 (&signs)[3]) {
  // The first butterfly is computed in float32, and its pairs become the two numbers of a half2.
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const float a = values[2 * j] * kHalfScale;
    const float b = values[2 * j + 1] * kHalfScale;
    pairs[j] = __floats2half2_rn(a + b, a - b);
  }
  // Two butterflies between the half2 of this thread.
#pragma unroll
  for (int step = 1; step < kPairs; step *= 2) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      if (j & step) continue;
      const __half2 a = pairs[j];
      const __half2 b = pairs[j + step];
      pairs[j] = __hadd2(a, b);
      pairs[j + step] = __hsub2(a, b);
    }
  }
  // Three between threads. The sign is -1 in the thread that holds b: it gets a - b.
#pragma unroll
  for (int step = 0; step < 3; ++step) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const __half2 other = __shfl_xor_sync(kAllLanes, pairs[j], 1 << step);
      pairs[j] = __hfma2(pairs[j], signs[step], other);
    }
  }
}

// Returns four numbers, multiplied with `steps` and rounded to int8, as the bytes of one word.
__device__ __forceinline__ unsigned round_four(__half2 first, __half2 second, float steps) {
  const float2 a = __half22float2(first);
  const float2 b = __half22float2(second);
  // The lowest byte of each sum is the rounded number.
  const unsigned low = __byte_perm(__float_as_uint(fmaf(a.x, steps, kRounder)),
                                   __float_as_uint(fmaf(a.y, steps, kRounder)), 0x0040);
  const unsigned high = __byte_perm(__float_as_uint(fmaf(b.x, steps, kRounder)),
                                    __float_as_uint(fmaf(b.y, steps, kRounder)), 0x0040);
  return __byte_perm(low, high, 0x5410);
}

// Treats one row with `kWarps` warps. A thread makes `kLoads` loads of 8 numbers.
template <int kLoads, int kWarps, int kPreparation>
__global__ void __launch_bounds__(kWarpsPerBlock* kLanes, blocks_at_once(kPreparation))
    round_rows(const __half* __restrict__ x, const __half* __restrict__ weight,
               const __half* __restrict__ bias, int8_t* __restrict__ out,
               float* __restrict__ out_scale, int rows, float eps) {
  static_assert(kWarps == 1 || kWarps == kWarpsPerBlock, "a barrier must not cross rows");
  static_assert(kWarps == 1 || kPreparation != kNorm, "a norm adds up the numbers of one warp");
  constexpr int kWidth = kLoads * kPerLoad * kLanes * kWarps;
  constexpr int kRowsPerBlock = kWarpsPerBlock / kWarps;
  const int lane = threadIdx.x % kLanes;
  const int warp = threadIdx.x / kLanes;
  const int row = blockIdx.x * kRowsPerBlock + warp / kWarps;
  if (row >= rows) return;  // whole warps only
  const int first_load = (warp % kWarps) * kLoads * kLanes + lane;
  const int64_t start = static_cast<int64_t>(row) * kWidth;

  float values[kLoads][kPerLoad];
  const uint4* source = reinterpret_cast<const uint4*>(x + start);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const uint4 loaded = __ldcs(source + first_load + i * kLanes);
    const __half2* pairs = reinterpret_cast<const __half2*>(&loaded);
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const float2 pair = __half22float2(pairs[j]);
      values[i][2 * j] = pair.x;
      values[i][2 * j + 1] = pair.y;
    }
  }
  if constexpr (kPreparation == kNorm) normalise<kLoads>(values, weight, bias, first_load, eps);

  const __half2 plus = __float2half2_rn(1.0f);
  const __half2 minus = __float2half2_rn(-1.0f);
  const __half2 signs[3] = {lane & 1 ? minus : plus, lane & 2 ? minus : plus,
                            lane & 4 ? minus : plus};
  __half2 rotated[kLoads][kPairs];
  __half2 largest_pair = __float2half2_rn(0.0f);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if constexpr (kPreparation == kGelu) {
#pragma unroll
      for (int j = 0; j < kPerLoad; ++j) values[i][j] = gelu(values[i][j]);
    }
    rotate(values[i], rotated[i], signs);
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      largest_pair = __hmax2_nan(largest_pair, __habs2(rotated[i][j]));  // keeps NaN
    }
  }
  // The bits of numbers that are not negative have the same order as the numbers, and those of NaN
  // are the largest. So a NaN is not lost.
  unsigned largest_bits = max(__float_as_uint(__low2float(largest_pair)),
                              __float_as_uint(__high2float(largest_pair)));
  largest_bits = max(largest_bits, __float_as_uint(kSmallestLargest));
  largest_bits = __reduce_max_sync(kAllLanes, largest_bits);
  if constexpr (kWarps > 1) {
    __shared__ unsigned bits_of_warps[kWarps];
    if (lane == 0) bits_of_warps[warp] = largest_bits;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kWarps; ++i) largest_bits = max(largest_bits, bits_of_warps[i]);
  }
  const float largest = __uint_as_float(largest_bits);
  if (lane == 0 && warp % kWarps == 0) out_scale[row] = largest / kLargestInt8;

  const float steps = kLargestInt8 / largest;
  uint2* target = reinterpret_cast<uint2*>(out + start);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    target[first_load + i * kLanes] = make_uint2(round_four(rotated[i][0], rotated[i][1], steps),
                                                 round_four(rotated[i][2], rotated[i][3], steps));
  }
}

struct Rows {
  const __half* x;       // [rows, width]
  const __half* weight;  // of a norm, [width]
  const __half* bias;    // of a norm, [width]
  int8_t* out;           // [rows, width]
  float* out_scale;      // [rows]
  int rows;
  float eps;
};

template <int kLoads, int kWarps, int kPreparation>
int launch(const Rows& r, cudaStream_t stream) {
  constexpr int kRowsPerBlock = kWarpsPerBlock / kWarps;
  const int blocks = (r.rows + kRowsPerBlock - 1) / kRowsPerBlock;
  round_rows<kLoads, kWarps, kPreparation><<<blocks, kWarpsPerBlock * kLanes, 0, stream>>>(
      r.x, r.weight, r.bias, r.out, r.out_scale, r.rows, r.eps);
  return static_cast<int>(cudaGetLastError());
}

constexpr int kUnknownWidth = -1;

}  // namespace virnuc_round_rows

// Returns 0, CUDA's number of an error, or -1 for a width that the library has no kernel for. It
// does not wait for the GPU. Pointers are addresses on the GPU that is current in the thread.
extern "C" int virnuc_int8_rows(const void* x, const void* weight, const void* bias, int8_t* out,
                                   float* out_scale, int rows, int width, float eps,
                                   int preparation, cudaStream_t stream) {
  using namespace virnuc_round_rows;
  const Rows r{static_cast<const __half*>(x), static_cast<const __half*>(weight),
               static_cast<const __half*>(bias), out, out_scale, rows, eps};
  if (rows == 0) return 0;
  // ESM-2 650M and 3B.
  if (preparation == kNorm && width == 1280) return launch<5, 1, kNorm>(r, stream);
  if (preparation == kNorm && width == 2560) return launch<10, 1, kNorm>(r, stream);
  if (preparation == kNothing && width == 1280) return launch<5, 1, kNothing>(r, stream);
  if (preparation == kNothing && width == 2560) return launch<10, 1, kNothing>(r, stream);
  if (preparation == kGelu && width == 5120) return launch<5, 4, kGelu>(r, stream);
  if (preparation == kGelu && width == 10240) return launch<10, 4, kGelu>(r, stream);
  return kUnknownWidth;
}
