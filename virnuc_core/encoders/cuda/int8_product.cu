// Products of int8 matrices on Hopper GPUs (compute capability 9.0), built with CUTLASS.
//
// This computes what the kernel `_product` of kernels.py computes, bit for bit, and faster: one
// group of warps writes its block of the product while another multiplies ("ping-pong"), and a block
// can have 192 columns, a number that Triton cannot express.
//
//   D[m, n] = fp16(fma(float(sum over k of A[m, k] * B[n, k]) * row_scale[m], scale[n], bias[n]))
//
// The sums are exact integers. `virnuc_int8_add` adds D to the matrix that is there, in float32.
//
// `build_kernels.py` compiles this file into a shared library. `hopper.py` loads it.

#include <cutlass/cutlass.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/util/packed_stride.hpp>

namespace virnuc_int8_product {

using cute::_0;
using cute::_1;
using cute::_128;
using cute::_2;
using cute::Int;
using cute::Shape;
using cute::Stride;
namespace fusion = cutlass::epilogue::fusion;
namespace collective = cutlass::gemm::collective;
namespace epilogue = cutlass::epilogue;

using Half = cutlass::half_t;
using RowMajor = cutlass::layout::RowMajor;
using ColumnMajor = cutlass::layout::ColumnMajor;
using Arch = cutlass::arch::Sm90;
using TensorOp = cutlass::arch::OpClassTensorOp;

// Rows, columns and depth of the block that a group of warps computes. More than 192 columns do not
// fit into the registers.
template <int kColumns>
using Block = Shape<_128, Int<kColumns>, _128>;
constexpr int kWideColumns = 192;
constexpr int kNarrowColumns = 128;
// Two neighbouring blocks of rows run as one cluster and load the same columns of B only once.
using Cluster = Shape<_2, _1, _1>;
constexpr int kBytesPerCopy = 16;  // rows must be multiples of this
constexpr int kHalfAlignment = kBytesPerCopy / sizeof(Half);
constexpr auto kRounding = cutlass::FloatRoundStyle::round_to_nearest;

// The epilogue is a tree of operations on each sum. A leaf is a number to compute with.
template <template <class> class Operation, class Result, class... Operands>
using Node = fusion::Sm90EVT<fusion::Sm90Compute<Operation, Result, float, kRounding>, Operands...>;

template <int kColumns>
struct Trees {
  using OfRows = Stride<_1, _0, int64_t>;     // one number for each row
  using OfColumns = Stride<_0, _1, int64_t>;  // one number for each column
  using Sum = fusion::Sm90AccFetch;
  using RowScale = fusion::Sm90ColBroadcast<0, Block<kColumns>, float, float, OfRows>;
  using ColumnScale = fusion::Sm90RowBroadcast<0, Block<kColumns>, float, float, OfColumns>;
  using Bias = fusion::Sm90RowBroadcast<0, Block<kColumns>, float, float, OfColumns>;
  using Old = fusion::Sm90SrcFetch<Half>;  // the matrix to which the product is added
  using ScaledSum = Node<cutlass::multiplies, float, RowScale, Sum>;
  template <class Result>
  using Product =
      Node<cutlass::homogeneous_multiply_add, Result, ScaledSum, ColumnScale, Bias>;
  using Store = Product<Half>;
  using Add = Node<cutlass::plus, Half, Product<float>, Old>;
};

// The kernel for one tree and one size of blocks. OldElement is void if nothing is added.
template <class Tree, class OldElement, int kColumns>
struct Kernels {
  using Epilogue = typename epilogue::collective::CollectiveBuilder<
      Arch, TensorOp, Block<kColumns>, Cluster, epilogue::collective::EpilogueTileAuto, int32_t,
      float, OldElement, RowMajor, kHalfAlignment, Half, RowMajor, kHalfAlignment,
      epilogue::TmaWarpSpecialized, Tree>::CollectiveOp;
  using Stages =
      collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>;
  using Mainloop = typename collective::CollectiveBuilder<
      Arch, TensorOp, int8_t, RowMajor, kBytesPerCopy, int8_t, ColumnMajor, kBytesPerCopy, int32_t,
      Block<kColumns>, Cluster, Stages,
      cutlass::gemm::KernelTmaWarpSpecializedPingpong>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<
      Shape<int, int, int, int>, Mainloop, Epilogue, cutlass::gemm::PersistentScheduler>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
};

struct Factors {
  const int8_t* a;         // [m, k]
  const int8_t* b;         // [n, k]
  Half* d;                 // [m, n]
  const float* row_scale;  // [m]
  const float* scale;      // [n]
  const float* bias;       // [n]
  int m, n, k;
};

// Launches a kernel. Returns 0, or 100 plus CUTLASS's status.
template <class Kind, class TreeArguments>
int launch(const Factors& f, TreeArguments tree, int multiprocessors, cudaStream_t stream) {
  using Gemm = typename Kind::Gemm;
  using Kernel = typename Kind::Kernel;
  auto a = cutlass::make_cute_packed_stride(typename Kernel::StrideA{}, {f.m, f.k, 1});
  auto b = cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, {f.n, f.k, 1});
  auto c = cutlass::make_cute_packed_stride(typename Kernel::StrideC{}, {f.m, f.n, 1});
  auto d = cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, {f.m, f.n, 1});
  typename Gemm::Arguments arguments{
      cutlass::gemm::GemmUniversalMode::kGemm, {f.m, f.n, f.k, 1}, {f.a, a, f.b, b},
      {tree, f.d, c, f.d, d}};
  arguments.hw_info.sm_count = multiprocessors;
  // Other orders of the blocks, and larger swizzles, were measured and are slower.
  Gemm gemm;
  cutlass::Status status = gemm.can_implement(arguments);
  if (status == cutlass::Status::kSuccess) status = gemm.initialize(arguments, nullptr, stream);
  if (status == cutlass::Status::kSuccess) status = gemm.run(stream);
  return status == cutlass::Status::kSuccess ? 0 : 100 + static_cast<int>(status);
}

// The arguments of a tree have its nesting: those of the operands of a node, then the node's own.
template <int kColumns>
int store(const Factors& f, int multiprocessors, cudaStream_t stream) {
  using Tree = typename Trees<kColumns>::Store;
  typename Tree::Arguments tree{{{f.row_scale}, {}, {}}, {f.scale}, {f.bias}, {}};
  return launch<Kernels<Tree, void, kColumns>>(f, tree, multiprocessors, stream);
}

template <int kColumns>
int add(const Factors& f, int multiprocessors, cudaStream_t stream) {
  using Tree = typename Trees<kColumns>::Add;
  typename Tree::Arguments tree{{{{f.row_scale}, {}, {}}, {f.scale}, {f.bias}, {}}, {}, {}};
  return launch<Kernels<Tree, Half, kColumns>>(f, tree, multiprocessors, stream);
}

// Wide blocks are faster, unless more than a fiftieth of their columns lies beyond the product.
bool fits_wide_blocks(int n) {
  const int beyond = (kWideColumns - n % kWideColumns) % kWideColumns;
  return beyond * 50 <= n;
}

}  // namespace virnuc_int8_product

// Both functions return 0, or a number that says why nothing was computed. They do not wait for the
// GPU. Pointers are addresses on the GPU that is current in the calling thread.

extern "C" int virnuc_int8_store(
    const int8_t* a, const int8_t* b, void* d, const float* row_scale, const float* scale,
    const float* bias, int m, int n, int k, int multiprocessors, cudaStream_t stream) {
  using namespace virnuc_int8_product;
  const Factors f{a, b, static_cast<Half*>(d), row_scale, scale, bias, m, n, k};
  return fits_wide_blocks(n) ? store<kWideColumns>(f, multiprocessors, stream)
                             : store<kNarrowColumns>(f, multiprocessors, stream);
}

extern "C" int virnuc_int8_add(
    const int8_t* a, const int8_t* b, void* d, const float* row_scale, const float* scale,
    const float* bias, int m, int n, int k, int multiprocessors, cudaStream_t stream) {
  using namespace virnuc_int8_product;
  const Factors f{a, b, static_cast<Half*>(d), row_scale, scale, bias, m, n, k};
  return fits_wide_blocks(n) ? add<kWideColumns>(f, multiprocessors, stream)
                             : add<kNarrowColumns>(f, multiprocessors, stream);
}
