// Scores with keys as rows, as gradients of keys and values want them: what masks hide of them, and
// the weights that they become.
#pragma once

#include "attngen/context.cuh"
#include "attngen/mma/fragment.cuh"
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/matrix_move.cuh"

namespace attngen {

// A query that does not see a key, and a key that is none, have scores of -inf. key, query: the
// thread's first.
template <int kQueries, class Masks>
ATTNGEN_DEVICE void hide_queries(float (&scores)[kQueries / 2], const Masks& masks,
                                 const Context& ctx, int key, int query) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int j = key + half * 8;
    const Range range = masks.col_range(ctx, j);
    const int lo = j < ctx.kv_len ? range.lo - query : kQueries;
    hide_outside<kQueries>(scores, half, lo, Masks::kBoundsLeft ? range.hi - query : kQueries);
  }
}

// S^T becomes P^T. lse: where the LSE of the thread's first query lies in shared memory.
template <int kQueries>
ATTNGEN_DEVICE void weigh_queries(float (&scores)[kQueries / 2], float scale_log2, u32 lse) {
#pragma unroll
  for (int i = 0; i < kQueries / 2; i += 4) {
    const float2 reference = load_shared_pair(lse + i * 8);
    scores[i] = exp2_approx(scores[i] * scale_log2 - reference.x);
    scores[i + 1] = exp2_approx(scores[i + 1] * scale_log2 - reference.y);
    scores[i + 2] = exp2_approx(scores[i + 2] * scale_log2 - reference.x);
    scores[i + 3] = exp2_approx(scores[i + 3] * scale_log2 - reference.y);
  }
}

}  // namespace attngen
