#include "delta_fixture.h"

#include <math.h>
#include <string.h>

void delta_init(delta_fixture* f) {
  memset(f, 0, sizeof *f);
  fill(f->q, TOKENS * HK * WIDTH, 31), fill(f->k, TOKENS * HK * WIDTH, 32), fill(f->v, TOKENS * H * DV, 33);
  fill(f->g, TOKENS * H * WIDTH, 34), fill(f->beta, TOKENS * H, 35), fill(f->a_log, H, 36);
  fill(f->dt_bias, H * WIDTH, 37), fill(f->initial, POOL * H * STATE, 38);
  fill_with_nan(f->out, TOKENS * H * DV), fill_with_nan(f->final, POOL * H * STATE);
  f->cu_seqlens[1] = 3, f->cu_seqlens[2] = TOKENS;
  f->args = rapt_delta_rule_args_init();
  f->args.q = contiguous(f->q, RAPT_F32, 4, B, T, HK, WIDTH);
  f->args.k = contiguous(f->k, RAPT_F32, 4, B, T, HK, WIDTH);
  f->args.v = contiguous(f->v, RAPT_F32, 4, B, T, H, DV);
  f->args.g = contiguous(f->g, RAPT_F32, 4, B, T, H, WIDTH);
  f->args.beta = contiguous(f->beta, RAPT_F32, 3, B, T, H, 0);
  f->args.out = contiguous(f->out, RAPT_F32, 4, B, T, H, DV);
  f->args.gate = 1;
  f->args.a_log = contiguous(f->a_log, RAPT_F32, 1, H, 0, 0, 0);
  f->args.dt_bias = contiguous(f->dt_bias, RAPT_F32, 2, H, WIDTH, 0, 0);
  f->args.initial_state = contiguous(f->initial, RAPT_F32, 4, B, H, WIDTH, DV);
  f->args.final_state = contiguous(f->final, RAPT_F32, 4, B, H, WIDTH, DV);
}
void make_ragged(delta_fixture* f) {
  rapt_delta_rule_args* const a = &f->args;
  a->q = contiguous(f->q, RAPT_F32, 3, TOKENS, HK, WIDTH, 0),
  a->k = contiguous(f->k, RAPT_F32, 3, TOKENS, HK, WIDTH, 0);
  a->v = contiguous(f->v, RAPT_F32, 3, TOKENS, H, DV, 0), a->g = contiguous(f->g, RAPT_F32, 3, TOKENS, H, WIDTH, 0);
  a->beta = contiguous(f->beta, RAPT_F32, 2, TOKENS, H, 0, 0);
  a->out = contiguous(f->out, RAPT_F32, 3, TOKENS, H, DV, 0);
  a->cu_seqlens = contiguous(f->cu_seqlens, RAPT_I32, 1, B + 1, 0, 0, 0);
}
void make_pool(delta_fixture* f, int steps) {
  f->args.initial_state.shape[0] = f->args.final_state.shape[0] = POOL;
  f->args.state_slots = contiguous(f->slots, RAPT_I64, steps ? 2 : 1, B, steps, 0, 0);
}

void make_decays(delta_fixture* f) {
  for (int i = 0; i < TOKENS * H * WIDTH; ++i) f->g[i] = -fabsf(f->g[i]);
}

int first_token(const delta_fixture* f, int b) {
  return f->args.cu_seqlens.ndim ? f->cu_seqlens[b] : b * T;
}
int token_count(const delta_fixture* f, int b) {
  return f->args.cu_seqlens.ndim ? f->cu_seqlens[b + 1] - f->cu_seqlens[b] : T;
}
int64_t slot_after(const delta_fixture* f, int b, int t) {
  const rapt_tensor* const slots = &f->args.state_slots;
  if (slots->ndim == 2) return f->slots[b * slots->shape[1] + t];
  if (t + 1 < token_count(f, b)) return -1;
  return slots->ndim ? f->slots[b] : b;
}

static double norm(const float* row) {
  double sum = 1e-6;
  for (int i = 0; i < WIDTH; ++i) sum += (double)row[i] * row[i];
  return sqrt(sum);
}

void delta_reference(const delta_fixture* f, const float* initial, double* out, double* states) {
  const rapt_delta_rule_args* const a = &f->args;
  const int steps = a->state_slots.ndim == 2 ? (int)a->state_slots.shape[1] : 1;
  const double scale = a->has_scale ? a->scale : 1 / sqrt(WIDTH);
  for (int b = 0; b < B; ++b)
    for (int h = 0; h < H; ++h) {
      double S[WIDTH][DV] = {{0}};
      const int start = a->accepted.ndim ? (int)f->accepted[b] - 1 : 0;
      const int64_t from = a->state_slots.ndim ? f->slots[b * steps + start] : b;
      for (int i = 0; a->initial_state.ndim && from >= 0 && i < STATE; ++i)
        S[i / DV][i % DV] = initial[(from * H + h) * STATE + i];
      for (int t = first_token(f, b); t < first_token(f, b) + token_count(f, b); ++t) {
        const float *q = f->q + (t * HK + h / (H / HK)) * WIDTH, *k = f->k + (t * HK + h / (H / HK)) * WIDTH;
        const double nq = a->l2norm_qk ? norm(q) : 1, nk = a->l2norm_qk ? norm(k) : 1;
        double beta = a->beta.ndim ? f->beta[t * H + h] : 1;
        if (a->beta_sigmoid) beta = 1 / (1 + exp(-beta));
        if (a->beta_double) beta *= 2;
        for (int i = 0; i < WIDTH && a->g.ndim; ++i) {
          double g = f->g[(t * H + h) * WIDTH + i];
          const double A = exp(a->a_log.ndim ? f->a_log[h] : 0);
          if (a->gate) {
            g += a->dt_bias.ndim ? f->dt_bias[h * WIDTH + i] : 0;
            g = a->has_gate_lower_bound ? a->gate_lower_bound / (1 + exp(-A * g)) : -A * log1p(exp(g));
          }
          for (int j = 0; j < DV; ++j) S[i][j] *= exp(g);
        }
        for (int j = 0; j < DV; ++j) {
          double u = f->v[(t * H + h) * DV + j], read = 0;
          if (a->rule >= RAPT_RULE_DELTA) {
            for (int i = 0; i < WIDTH; ++i) u -= S[i][j] * k[i] / nk;
            u *= beta;
          }
          for (int i = 0; i < WIDTH; ++i) S[i][j] += k[i] / nk * u, read += scale * S[i][j] * q[i] / nq;
          out[(t * H + h) * DV + j] = read;
        }
        memcpy(states + (t * H + h) * STATE, S, sizeof S);
      }
    }
}
