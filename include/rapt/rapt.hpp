// The whole public C++ interface.
#pragma once

#include "rapt/attention.hpp"
#include "rapt/attention_backward.hpp"
#include "rapt/context.hpp"
#include "rapt/delta_rule.hpp"
#include "rapt/delta_rule_backward.hpp"
#include "rapt/dropout.hpp"
#include "rapt/kv_cache.hpp"
#include "rapt/kv_source.hpp"
#include "rapt/merge_states.hpp"
#include "rapt/plan.hpp"
#include "rapt/problem.hpp"
#include "rapt/roofline.hpp"
#include "rapt/score.hpp"
#include "rapt/tensor.hpp"
#include "rapt/types.hpp"
