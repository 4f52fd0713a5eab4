#!/usr/bin/env bash
# Shows that the exactness tests can fail: each named one-line break of the library, or of an adapter, turns its test red.
#
#   tests/breaks.sh            applies each break to a copy of the tree and runs its test (a few minutes)
#   tests/breaks.sh WORDS      only those whose names match the regular expression
#   tests/breaks.sh --check    only checks that every break still applies (a second)
#
# A break is: name ~ file ~ Perl substitution ~ cargo test arguments that must fail. Those of device code, and those of the test faults, are
# tried on the emulated device (tests/emulated), with the kernels of SPLIT32 for up to 128 columns.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
copy=$root/build/breaks

breaks() {
  cat <<'TABLE'
fold one token fewer~src/backend/cpu/mamba2.rs~s/\(decays\.get\(\.\.n\), xd/(decays.get(..n.max(2) - 1), xd/~--test exactness mamba2_bf16
a ring row off by one~src/backend/cpu/mamba2.rs~s/(let \(state, head\) = \(&at\.state, at\.state\.head\(\)\);\n        let row = self\.slots\.rule\.row\(at\.position \+ t)\)/$1 + 1)/~--test exactness mamba2_bf16
a tag not set~src/backend/cpu/tiles.rs~s/(checkpoint_written \+= bytes;\n\s*)self\.set_tag\(tile, position\);/$1/~--test exactness mamba2_f16
a record without its decay~src/backend/cpu/mamba2.rs~s/Dtype::F32, &\[dt, g\]\)/Dtype::F32, &[dt, g * 0.999])/~--test exactness mamba2_f32
one record of history too many~src/backend/cpu/mamba2.rs~s/\(from, source\) = \(stop, /(from, source) = (stop - 1, /~--test exactness mamba2_f32
B of the wrong group~src/backend/cpu/mamba2.rs~s/head\.is_multiple_of\(self\.dims\.heads_per_group\(\)\)/head == 0/~--test exactness mamba2_f16
contraction off in the update~src/replay/step.rs~s/l\.fma\(self\.xd, l\.load\(&self\.b\.blocks\(\)\[j\]\), (self\.decay\.apply\(l, j, s\))\)/l.fma(l.mul(self.xd, l.load(\&self.b.blocks()[j])), l.splat(1.0), $1)/~--test exactness golden
another order of the reduction~src/replay/numerics.rs~s/\(c\[0\] \+ c\[1\]\) \+ \(c\[2\] \+ c\[3\]\)/(c[0] + c[2]) + (c[1] + c[3])/~--test exactness golden
fast decay for slow ones~src/replay/numerics.rs~s/let slow = g > -1\.0;/let slow = g > -0.01;/~--test exactness golden
difference of prefix sums~src/backend/cpu/mamba2.rs~s/exp\(since \+ elapsed\) \* product/exp((since + 1e4) - (1e4 - elapsed)) * product/~--test readout full_stays
EXACT from the high plane~src/replay/step.rs~s/l\.load_planes\(&self\.high\[j\], &self\.low\[j\]\)/l.load_bf16(\&self.high[j])/~--test exactness options_and_real
low plane dropped at a store~src/replay/numerics.rs~s/\(high as u16, bits\.wrapping_sub\(high << 16\) as i16\)/(high as u16, 0)/~--test exactness mamba2_bf16
a commit takes all tokens~src/backend/cpu/life.rs~s/let position = cursor\.position\.load\(Relaxed\) \+ count;/let position = cursor.position.load(Relaxed) + span.len;/~--test position_model staggered
a place is told before it is written~src/backend/report.rs~s/load\(Acquire\) != PLACE_WRITTEN/load(Acquire) == PLACE_NONE/~--lib a_place_is_complete
a reader gives back a place that it has not taken~src/backend/report.rs~s/Acquire, Relaxed\)\.is_err\(\)/Acquire, Relaxed).is_err() \&\& self.count.load(Relaxed) > 99/~--lib a_place_is_taken
a part looks at inputs that others overwrite~src/backend/cpu/inspect.rs~s/is_alone \|\| !input/true || !input/~--test checks inputs_in_whose
kept tokens are folded~src/replay/position.rs~s/let limit = v\.position - self\.keep;/let limit = v.position;/~--test position_model min_rewind
a late commit counts~src/backend/cpu/life.rs~s/!= cursor\.generation\.load\(Relaxed\)/> u32::MAX - 1/~--test cases case_10
a tag outside the window is believed~src/replay/position.rs~s/&& tag <= position\b//~--test cases between_an_extend
padding is written~src/backend/cpu/rows.rs~s/if slot < 0 \|\| Some\(slot\) == null_id/if slot < 0/~--test cases case_11
a convolution window off by one~src/backend/cpu/conv1d.rs~s/let p = position - \(width as i64 - 1\) \+ i as i64;/let p = position - width as i64 + i as i64;/~--test conv1d windows
convolution rows overwritten too soon~src/replay/position.rs~s/position \+ tokens - self\.keep - self\.max_step_tokens/position + tokens - self.keep - self.max_step_tokens - 3/~--test conv1d rewind
all rings fold at once~src/replay/position.rs~s/\(ring\.rem_euclid\(self\.window\) \* self\.stagger\(\)\)\.rem_euclid\(self\.window\)/0/~--test position_model even
a delta rule folds one token fewer~src/backend/cpu/delta.rs~s/v\.get\(\.\.n\)\)/v.get(..n.max(2) - 1))/~--test exactness gdn_bf16
beta missing from the record~src/backend/cpu/delta.rs~s/Dtype::F32, &\[self\.beta\(at, t\)\]/Dtype::F32, &[1.0]/~--test exactness kda_f16
the norm of k not recorded~src/backend/cpu/delta.rs~s/unsafe \{ raw::store\(state\.norm\.at\(head, row\), Dtype::F32, &\[norm\]\) \};/let _ = norm;/~--test exactness gdn_f32
tiled heads read as grouped~src/replay/config.rs~s/HeadMap::Tiled => v_head % self\.qk_heads/HeadMap::Tiled => v_head \/ (self.v_heads \/ self.qk_heads)/~--test exactness extend_is_the_delta_rule
one decay for all key channels~src/replay/step.rs~s/Decay::new\(g\[i\]\)/Decay::new(g[0])/~--test exactness extend_is_the_delta_rule
a fp32 record of u off by one row~src/backend/cpu/delta.rs~s/(fn record_u.*?self\.row\(position)/$1 + i64::from(self.u_dtype == Dtype::F32)/s~--test readout delta_rules_keep
stochastic rounding by another position~src/backend/cpu/tiles.rs~s/rounding_words\(seed, position,/rounding_words(seed, position + 1,/~--test exactness sixteen_bit
a check looks at one token fewer~src/backend/cpu/inspect.rs~s/\(0\.\.span\.len\)/(0..span.len - 1)/~--test checks infinities_and
forks keep the flush point of their source~src/backend/cpu/copy.rs~s/slots\.rule\.flush_before\(position, to_ring\)/slots.rule.flush_before(position, 0)/~--test schedule forks
a helper thread allocates~src/backend/cpu/threads.rs~s/served = number;/served = number; drop(std::hint::black_box(vec![number]));/~--test allocations
a reset copies the list of pools~src/replay/slots.rs~s/(pub fn reset.*?self\.pools\(\))/$1.clone()/s~--test allocations
a 16-bit tile goes on as it was before its store~src/backend/cpu/tiles.rs~s/unsafe \{ raw::load\(self\.row\(row\), self\.dtype\(\), source\) \};//~--test exactness sixteen_bit
ring ids read from the slot ids~src/backend/cpu/rows.rs~s/at\(ids\.1\)/at(ids.0)/~--test pairwise quarter
D per element read as D per head~src/ffi/convert.rs~s/(switch\("args\.D_per_element", from\.D_per_element\)\?)/$1 \&\& false/~--test pairwise quarter
a flush folds what is kept~src/backend/cpu/fold.rs~s/position\(slots, ring\) - slots\.rule\.keep/position(slots, ring)/~--test life a_flush_is
a snapshot one token early~src/backend/cpu/fold.rs~s/before < at && at <= position/before <= at \&\& at <= position/~--test life a_snapshot
a commit that does not say what it added~src/backend/cpu/life.rs~s/cursor\.committed\.store\(count as u32, Relaxed\);//~--test life a_snapshot
a stored state rounded by another position~src/backend/cpu/fold.rs~s/target\.store\(tile, values, held\.at,/target.store(tile, values, held.at + 1,/~--test life a_stored
a fork without its seed~src/backend/cpu/copy.rs~s/target\.seed\.store\(seed, Relaxed\);\n(\s*target\.flush_before)/$1/~--test life a_fork
a fork without its ring~src/backend/cpu/copy.rs~s/CopyKind::Stored if c\.per_ring => \{\}/_ if c.per_ring => {}/~--test life a_fork
a move that leaves a way back~src/backend/cpu/copy.rs~s/if args\.kind == CopyKind::Move/if args.kind == CopyKind::Stored/~--test life a_move
a checkpoint that stands elsewhere is loaded~src/backend/cpu/copy.rs~s/store\(if tag == position \{ tag \} else \{ -1 \}, Relaxed\)/store(position, Relaxed)/~--test life a_checkpoint_that
a stored window off by one~src/backend/cpu/fold.rs~s/held\.at - \(dims\.width as i64 - 1\)\)/held.at - dims.width as i64)/~--test conv1d windows_are
a flush is left to no step unless staggered~src/replay/position.rs~s/if v\.tag < v\.flush_before/if self.schedule == Schedule::Staggered \&\& v.tag < v.flush_before/~--test life later_step
slots of a named pool read from the list~src/replay/launch.rs~s/match self\.named\.of\(pool\.index\) \{/match self.named.of(pool.index).filter(|_| self.list.n < 0) {/~--test life pools_have
a kernel folds one token fewer~cuda/mamba2/mamba2.cuh~s/(>= w\.tag\[warp_of\(\)\] && at) < (w\.stop)/$1 + 1 < $2/~--test across few_models_of_mamba2
a kernel's record off by one row~cuda/mamba2/mamba2.cuh~s/i64 at = w\.position \+ t;/i64 at = w.position + t + 1;/~--test across few_models_of_mamba2
a kernel takes its gates from the next record~cuda/mamba2/mamba2.cuh~s/gates_of\(p, first \+ threadIdx\.x\)/gates_of(p, first + min((i32)threadIdx.x + 1, n - 1))/~--test across few_models_of_mamba2
a kernel without a barrier behind what it stages~cuda/mamba2/mamba2.cuh~s/(AT_GATES, true\}, first, n, own, n\);\n)\s*__syncthreads\(\);/$1/~--test across few_models_of_mamba2
a barrier for a part of a kernel's warps~cuda/delta/delta.cuh~s/(    stage_v<ROWS>\(p, channels\(p, AT_V, i\), at \+ i\);\n)/$1    __syncthreads();\n/~--test across few_models_of_gdn
contraction in a kernel's update~cuda/delta/delta.cuh~s/__fmul_rn\(beta, __fsub_rn\(v\[8 \* h\], u\[h\]\)\)/fma(beta, v[8 * h], -__fmul_rn(beta, u[h]))/~--test across few_models_of_gdn
a kernel's tag not set~cuda/common/block.cuh~s/(lane_index\(\) == 0) && w\.tag_at/$1 && w.live > 1 && w.tag_at/~--test across few_models_of_gdn
a kernel writes the tail of a faulty extend~cuda/common/block.cuh~s/return !__syncthreads_or\(c\.rows > 0 && \*c\.tag != .stop\);/return __syncthreads_or(1) || c.rows > stop;/~--test cases a_faulty_extend
a kernel records u of another token~cuda/delta/delta.cuh~s/u_at\(p, w\.position \+ token\)/u_at(p, w.position + token + 1)/~--test across few_models_of_kda
a kernel's keys decay by the record before~cuda/delta/delta.cuh~s/i32 row = newest - done - e;/i32 row = newest - done - e - 1;/~--test across few_models_of_kda
a kernel checks the guards of another slot~cuda/slots/inspect.cu~s/g\.per_ring \? r\.ring : r\.slot/g.per_ring ? r.slot : r.ring/~--test checks a_byte_beside
a decoding kernel folds one record fewer~cuda/common/decode.cuh~s/for \(i32 i = 0; i < n; i\+\+\) \{\n    const float \*record/for (i32 i = 0; i + 1 < n; i++) {\n    const float *record/~--test decode few_of_split32
a decoding kernel brings the record before~cuda/mamba2/decode.cu~s/item\.first = item\.at - records;/item.first = item.at - records - 1;/~--test decode few_of_split32
a decoding kernel weighs a record without the decay of later ones~cuda/common/decode.cuh~s/float weight = fast_exp\(without \+ newer\);/float weight = fast_exp(0.0f * (without + newer));/~--test decode few_of_split32
a decoding kernel copies on behind the ring's end~cuda/common/decode.cuh~s/before = min\(n, ring_rows - first\) \* row_bytes/before = n * row_bytes/~--test decode few_several_of_split32
a decoding kernel decodes keys on behind the ring's end~cuda/common/decode.cuh~s/(row = item\.first \+ record;\n)    if \(row >= params\.family\.ring_rows\) row -= params\.family\.ring_rows;\n/$1/~--test decode few_gdn_of_split32
a decoding kernel takes the first tile for all of a head~cuda/common/decode.cuh~s/if \(job\.head->kind != ODD\) return Folds/if (true) return Folds/~--test decode tiles_that_stand
a decoding kernel sets tags of tiles that did not fold~cuda/common/decode.cuh~s/f = folds_of_tile<Family>\(params, again, unit\.tile\);/f = Folds{again.head->from, again.head->folds};/~--test decode tiles_that_stand
a decoding kernel believes any tag~cuda/mamba2/decode.cu~s/bad = bad \|\| !tag_is_valid/bad = false \&\& !tag_is_valid/~--test decode tags_that
a decoding kernel of a delta rule believes any tag~cuda/delta/decode.cu~s/bad = bad \|\| !tag_is_valid/bad = false \&\& !tag_is_valid/~--test decode tags_that
a decoding kernel leaves out records that fold~cuda/common/decode.cuh~s/return Folds\{job\.head->from, job\.head->folds\};/return Folds{job.head->from + job.head->folds * (warp_of() < services_of(params.pipeline) + params.pipeline.consumers), job.head->folds};/~--test decode few_of_split32
a decoding kernel writes a checkpoint before its bytes have come~cuda/common/decode.cuh~s/  ptx_counter_wait\(places\(\)\.taken\(.*?\n//~--test decode few_of_split32
a decoding kernel takes an item twice and leaves another out~cuda/common/decode.cuh~s/before : in_order - 1 - \(turn_of - before\)/before : in_order - 1 - (turn_of - before) \/ 2 * 2/~--test decode
a decoding kernel reads rows of a checkpoint in another order than columns~cuda/common/decode.cuh~s/\(\(2 \* step \+ matrix \/ 2\) \^ row % ORDERS\)/(2 * step + matrix \/ 2)/~--test decode few_of_split32
a decoding kernel of several tokens adds records of FULL as bfloat16~cuda/mamba2/decode.cu~s/PARTS = HIGH \? 2 : 3/PARTS = HIGH ? 2 : 1/~--test decode few_several_of_split32
a decoding kernel of several tokens of a delta rule adds the upper parts of records alone~cuda/common/decode.cuh~s/    ptx_mma_m16n8k8_tf32\(y, lower, first, y\);\n//~--test decode few_several_gdn
a decoding kernel leaves the token's own weight out~cuda/common/decode.cuh~s/__fmul_rn\(weight, products\[c/__fmul_rn(is_record ? weight : 0.0f, products[c/~--test decode few_of_split32
a decoding kernel of several tokens leaves their own weights out~cuda/common/decode.cuh~s/if \(of <= to && to < len\)/if (of < to \&\& to < len)/~--test decode few_several_of_split32
a decoding kernel does not decay between tokens of a step~cuda/common/decode.cuh~s/brings = __fmul_rn\(fast_exp\(sum\), /brings = __fmul_rn(1.0f, /~--test decode few_several_of_split32
a decoding kernel of a delta rule without beta~cuda/delta/decode.cu~s/u\[2\] = \{beta \* \(pair_low\(v\) - y\[0\]\), beta \*/u[2] = {pair_low(v) - y[0], beta */~--test decode few_gdn_of_split32
a decoding kernel of several tokens of a delta rule without beta~cuda/delta/decode.cu~s/u\[t\] = job\.gates\[t\]\.x \* \(from_bf16\(v\)/u[t] = (from_bf16(v)/~--test decode few_several_gdn
a decoding kernel of several tokens of a delta rule forgets those before~cuda/delta/decode.cu~s/seen = fma\(own_weight\(s, job, t, i\), u\[i\], seen\);//~--test decode few_several_gdn
a decoding kernel takes the rows of a head's first part for all~cuda/delta/decode.cu~s/channel = part \* pipeline\.channels;/channel = 0;/~--test decode few_parts
a decoding kernel has tags of a head's first part for all~cuda/common/decode.cuh~s/j\.head->part \* s\.tiles/0/~--test decode few_parts
a decoding kernel of Kimi Delta Attention takes fast decays for slow ones~cuda/delta/decode_kda.cuh~s/bits >> e & 1 \? t\.v\[h\]\[j\]\[e\] : -0\.0f/t.v[h][j][e]/~--test decode few_fast_columns
a decoding kernel of Kimi Delta Attention weighs records without the decays of later ones~cuda/delta/decode_kda.cuh~s/elapsed\[e\] = exists \? add_log\(elapsed\[e\], g\[e\]\) : elapsed\[e\];//~--test decode few_kda_of_split32
a block a head folds one record fewer~cuda/mamba2/direct.cu~s/for \(; i < stop; i\+\+\)/for (; i + 1 < stop; i++)/~--test decode few_of_split32
a block a head weighs a record without the decay of later ones~cuda/common/direct.cuh~s/fast_exp\(without \+ newer\)/fast_exp(0.0f * (without + newer))/~--test decode few_of_split32
a block a head copies on behind the ring's end~cuda/common/direct.cuh~s/before = min\(n, rows - first\)/before = n/~--test decode few_late
a block a head leaves the newest record out~cuda/common/direct.cuh~s/age < k\.held\);\n    if \(lane == 0\)/age + 1 < k.held);\n    if (lane == 0)/~--test decode few_of_split32
a block a head has records for a tile that has folded them~cuda/common/direct.cuh~s/if \(from > 0\)/if (from > MAX_TOKENS * 100)/~--test decode tiles_that_stand
a block a head believes any tag~cuda/common/direct.cuh~s/bool bad = lane < s\.tiles && /bool bad = false \&\& /~--test decode tags_that
a block a head leaves the token's own weight out~cuda/mamba2/direct.cu~s/i \+ e <= t && t < len/i + e < t \&\& t < len/~--test decode few_of_split32
a block a head does not decay between tokens of a step~cuda/mamba2/direct.cu~s/__fmul_rn\(decay_between\(i \+ e, t\), /__fmul_rn(1.0f, /~--test decode few_several_of_split32
a block a head adds records of FULL as bfloat16~cuda/mamba2/direct.cu~s/PARTS = HIGH \? 2 : 3/PARTS = HIGH ? 2 : 1/~--test decode few_of_split32
a block a head of a delta rule without beta~cuda/delta/direct.cu~s/k\.gates\[t\]\.x \* \(from_bf16\(v\) - y\)/(from_bf16(v) - y)/~--test decode few_gdn_of_split32
a block a head of a delta rule forgets tokens before~cuda/delta/direct.cu~s/y = fma\(of\[i\], u\[i\], y\);/y = fma(0.0f, u[i], y);/~--test decode few_several_gdn
a block a head of a delta rule folds u for v~cuda/delta/direct.cu~s/bring_half\(half, memory \+ d\.at_values, d\.value_stride, folded/bring_half(half, memory + d.at_others, 0, folded/~--test decode few_gdn_of_split32
a block a head of a delta rule takes its first part's channels for all~cuda/delta/direct.cu~s/(VALUE_BYTES\)) \+ first \* VALUE_BYTES/$1/~--test decode few_parts
a block a head does not let keys decay per column~cuda/delta/direct_kda.cuh~s/\[pair\], elapsed\);/[pair], make_float2(0.0f, 0.0f));/~--test decode few_kda_of_split32
a block a head sums log decays of its own records alone~cuda/delta/direct_kda.cuh~s/float2 elapsed = newer;/float2 elapsed = make_float2(0.0f, 0.0f);/~--test decode few_kda_of_split32
a block a head reads the checkpoint as if it stood at the step~cuda/delta/direct_kda.cuh~s/d\.at_reached, true, ring_rows/d.at_reached, false, ring_rows/~--test decode few_kda_of_split32
a block a head takes decays of one tile for all~cuda/delta/direct_kda.cuh~s/bool apart = stand_apart\(p\.state\);/bool apart = false;/~--test decode tiles_that_stand
a block a head multiplies upper parts of columns alone~cuda/delta/direct_kda.cuh~s/(second\[n\], upper), rest,/$1, right,/~--test decode few_kda_of_split32
a block a head folds all columns as slow ones~cuda/delta/direct_kda.cuh~s/__ballot_sync\(0xFFFFFFFFu, decay\.slow\)/0xFFFFFFFFu/~--test decode few_fast_columns
a block a head brings tokens to each other without decays~cuda/delta/direct_kda.cuh~s/t > i \? add_log\(elapsed\[e\], g\[e\]\) : 0\.0f/0.0f/~--test decode few_several_kda
a kernel of single tokens stores a record late~cuda/mamba2/single.cu~s/stop = progress\.stop;/stop = progress.stop > 1 ? progress.stop - 1 : 0;/~--test single few_of_mamba2
a kernel of single tokens takes its record's gates from elsewhere~cuda/mamba2/single.cu~s/row_behind\(oldest, lane, p\.ring_rows\)/row_behind(oldest, lane + 1, p.ring_rows)/~--test single few_of_mamba2
a kernel of single tokens skips a ring row~cuda/common/single.cuh~s/i32 row = first \+ i;/i32 row = first + i + (i > 1);/~--test single few_of_gdn
a kernel of single tokens without a barrier behind what it stages~cuda/delta/single.cu~s/__syncthreads\(\);\n(    \}\n    if \(is_first\) arrived)/$1/~--test single few_of_gdn
contraction in a kernel of single tokens~cuda/delta/single.cu~s/__fmul_rn\(m\.beta\[r\], __fsub_rn\((m\.v\[r\]\[.*?\]), u\)\)/fma(m.beta[r], $1, -__fmul_rn(m.beta[r], u))/~--test single few_of_kda
a kernel of single tokens believes any tag~cuda/common/single.cuh~s/bad = exists && !tag_is/bad = false \&\& !tag_is/~--test single tags_that
a kernel commits all tokens~cuda/slots/commit.cu~s/cursor\.position \+ count;/cursor.position + len;/~--test across few_models_of_mamba2
a rewind kernel does not go back to a checkpoint~cuda/slots/rewind.cu~s/position >= newest/position > newest/~--test across few_models_of_kda
a blob without the first record of a history~src/replay/save.rs~s/_ => oldest\.\.position/_ => oldest + 1..position/~--test save live_blob
a blob without what is in front of a convolution's tag~src/replay/save.rs~s/oldest - \(c\.width as i64 - 1\)\.\.position/oldest..position/~--test save live_blob
a blob with what others left in the ring~src/replay/save.rs~s/blob::clear_records\(part, shape, /let _ = (\&part, shape, /~--test save equal_requests
the first fold of a blob is forgotten~src/replay/save.rs~s/Cursor \{ position, flush_before, seed, generation, committed: 0 \}/Cursor { position, flush_before: flush_before * 0, seed, generation, committed: 0 }/~--test save live_blob
the seed of a blob is forgotten~src/replay/save.rs~s/Cursor \{ position, flush_before, seed, generation, committed: 0 \}/Cursor { position, flush_before, seed: seed ^ 1, generation, committed: 0 }/~--test save live_blob
layers of a portable blob in another order~src/replay/save.rs~s/(layers = \|pool: &PoolView\| )(0\.\.pool\.config\.n_layers as i64);/\1(\2).rev();/~--test save any_window
a destroyed handle is the next one's~src/ffi/handles.rs~s/wrapping_add\(1\) & 0xFFFF_FFFF/wrapping_add(0) \& 0xFFFF_FFFF/~--test stress handles_that
two threads count at once~src/backend/cpu/counters.rs~s/self\.tokens\.fetch_add\(tokens as u64, Relaxed\);/let n = self.tokens.load(Relaxed); std::thread::yield_now(); self.tokens.store(n + tokens as u64, Relaxed);/~--test stress threads_on
a tag of a blob is believed~src/replay/blob.rs~s/if !valid \{/if !valid \&\& position < 0 {/~--test save cases_14
the end of a blob is not summed~src/replay/blob.rs~s/crc32fast::hash\(all\)/crc32fast::hash(\&all[..all.len() - 1])/g~--test save cases_14
a rebind moves nothing~src/replay/slots.rs~s/view\.move_to\(site, table\);/let _ = (view, site, table);/~--test lent moved_to
a lent page without its offset~src/replay/slots.rs~s/base\.0\.checked_add\(l\.offset as usize\)/base.0.checked_add(l.offset as usize * 0)/~--test lent case_12
layers that overlap around the end of a stride~src/replay/slots.rs~s/apart\.min\(stride - apart\) < bytes/apart < bytes/~--test lent overlap
rings go by the slots of the list~src/replay/launch.rs~s/Which::Both if !self\.named\.is_empty\(\)/Which::Both if self.named.is_empty()/~--test life rings_go
a plan without padding~src/replay/capacity.rs~s/add\(bytes, c\.stride/add(bytes, c.bytes/~--test plan the_total
a plan without counters~src/replay/capacity.rs~s/\(budget\.saturating_sub\(COUNTER_BYTES\) \/ each\)/(budget \/ each)/~--test plan case_19
a kernel takes every layer for the first~cuda/common/batch.cuh~s/\(\(const i64 \*\)c\.base\)\[layer\]/((const i64 *)c.base)[0]/~--test lent anywhere
a fold kernel takes in one token fewer~cuda/common/fold.cuh~s/w\.base \+ i >= w\.tag\[warp_of\(\)\]/w.base + i > w.tag[warp_of()]/~--test across few_models_of_gdn
a fold kernel sets no tag~cuda/common/fold.cuh~s/half \+ H == 2 && c\.rows > 0/half + H == 3 \&\& c.rows > 0/~--test life pools_have
a snapshot kernel misses what is just reached~cuda/common/batch.cuh~s/wanted <= c\.position;/wanted < c.position;/~--test life a_prefix
a copy kernel leaves words behind~cuda/slots/copy.cu~s/whole \/ 16, swap/whole \/ 16 - 1, swap/~--test life many_forks
a load kernel believes any tag~cuda/slots/copy.cu~s/bool stands = from\[i\] == position;/bool stands = from[i] <= position;/~--test life a_checkpoint_that
a kernel's code stays loaded~src/backend/cuda/driver.rs~s/unsafe \{ \(self\.device\.driver\.cuLibraryUnload\)\(self\.library\) \};//~--test faults whatever_fails
a launch that was refused is taken for done~src/backend/cuda/driver.rs~s/self\.check\(status, "cuLaunchKernelEx"\)/self.check(status * 0, "cuLaunchKernelEx")/~--test faults a_call_that_failed
a lost context is asked again~src/backend/cuda/driver.rs~s/\n\s*R::CUDA_ERROR_ILLEGAL_ADDRESS,//~--test faults a_lost_context
a call does not look whether its device is there~src/ffi/handles.rs~s/pinned\.runs_on\(\)\.check_alive\(\)\?;//~--test faults a_lost_context
an adapter's column of a block table~examples-cpp/adapters/vllm/selective_state_update.cpp~s/(m\.state_batch_indices\.dtype), m\.state_batch_indices\.stride\[0\]\)/$1, 1)/~--test engines the_vllm_adapter
an adapter's null block~examples-cpp/adapters/vllm/selective_state_update.cpp~s/batch->flags = REPLAYSSM_BATCH_NULL_ID;/batch->flags = 0;/~--test engines the_vllm_adapter
an adapter's counts are those of rejected tokens~examples-cpp/adapters/vllm/selective_state_update.cpp~s/REPLAYSSM_COUNTS_ACCEPTED;/REPLAYSSM_COUNTS_REJECTED;/~--test engines the_vllm_adapter
an adapter folds later than its engine~examples-cpp/adapters/flashinfer/checkpointing_ssu.cpp~s/ring_buffer_len - T_max :/ring_buffer_len :/~--test engines the_flashinfer_adapter
an adapter's dt at the end of its padding~examples-cpp/adapters/trtllm/selective_scan_update.cpp~s/projected - dt_padded/projected - p.nheads/~--test engines the_tensorrt_llm_adapter
an adapter's states as they come~examples-cpp/adapters/trtllm/selective_scan_update.cpp~s/STATE_COL_MAJOR/STATE_ROW_MAJOR/~--test engines the_tensorrt_llm_adapter
an adapter's present is past~examples-cpp/adapters/onnxruntime_genai/varlen_gated_delta_net.cpp~s/1 - past\.bank/past.bank/~--test engines genai_adapter
an adapter's rejected drafts are the accepted ones~examples-cpp/adapters/ggml/replayssm_ggml.hpp~s/COUNTS_REJECTED;/COUNTS_ACCEPTED;/~--test ggml
an adapter's key heads are shared by neighbours~examples-cpp/adapters/ggml/replayssm_ggml.hpp~s/HEAD_MAP_TILED/HEAD_MAP_GROUPED/~--test llama
an adapter's states are those of other layers~examples-cpp/adapters/ggml/replayssm_ggml.hpp~s/\*compute\)\(dst, op\.layer/*compute)(dst, 0/~--test ggml
an adapter takes back before it commits~examples-cpp/adapters/ggml/replayssm_llama.hpp~s/(bool remove_tail[^;]*\{\n\s*)commit\(\);/$1/~--test llama
an adapter goes on from another sequence~examples-cpp/adapters/ggml/replayssm_llama.hpp~s/seq_ids\[i \* n_tokens\]\[0\]/seq_ids[0][0]/~--test llama
a ring of one row too few~src/replay/position.rs~s/(pub fn rows\(&self\) -> i64 \{\n        self\.window \+ self\.keep \+ self\.max_step_tokens)/$1 - 1/~--test soak
a request forgets its fold when it is saved~src/replay/save.rs~s/_ => oldest\.\.position/_ => (oldest + 1).min(position)..position/~--test soak
a handle of a call that failed is left as it was~src/ffi/calls.rs~s/unsafe \{ write_out\(out, std::ptr::null_mut\(\)\) \};\n        Ok\(Out/let _ = out;\n        Ok(Out/~--test fuzz calls
a failed call says nothing~src/ffi/guard.rs~s/write!\(last, "\{error\}"\)/write!(last, "")/~--test fuzz calls
a stored blob with a seed is taken~src/replay/blob.rs~s/if !has && value != 0/if !has \&\& value != 0 \&\& value == u64::MAX/~--test fuzz blobs
tokens of a rewind stay~src/backend/cpu/life.rs~s/fetch_sub\(wanted\(i\), Relaxed\)/fetch_sub(wanted(i).min(3), Relaxed)/~--test fuzz differential
an adapter in Python that takes dt as it comes~examples-cpp/adapters/pytorch/replayssm_torch.py~s/int\(not dt_softplus\)/int(dt_softplus)/~--test python
TABLE
}

# The copy's tests, not optimised: they stop at the first difference, and compiling would take longer than that.
broken() {
  (cd "$copy" && REPLAYSSM_CUDA=off CARGO_TARGET_DIR=$root/build/breaks-target \
    cargo test --locked --quiet --config profile.dev.package.replayssm.opt-level=0 "$@") >"$copy/log" 2>&1 </dev/null
}

# ---- Breaks of device code: the programs are the tree's own, and the device is made of the copy's kernels ----

emulated=$root/build/breaks-emulated
declare -A programs=()

# Builds what all of them share. Where it cannot be done, reason says why.
reason=
prepare_device() {
  [ ${#programs[@]} = 0 ] || return 0
  mkdir -p "$emulated"
  reason="no C++ compiler for x86-64"
  [ "$(uname -m)" = x86_64 ] && command -v "${CXX:-g++}" >/dev/null || return 1
  reason="the library was built without kernels"
  cargo run --locked --quiet --example kernel_list | grep -vE '^[a-z0-9_]+(_256 |_b?f(16|32)_)' >"$emulated/kernels" || return 1
  local name program
  while read -r name program; do
    programs[$name]=$program
  done < <(cargo test --locked --quiet --no-run --message-format=json-render-diagnostics --test across --test cases --test checks --test decode --test life --test lent --test single | python3 -c '
import json, sys
for message in map(json.loads, sys.stdin):
    if message.get("executable") and message["profile"]["test"]:
        print(message["target"]["name"], message["executable"])')
}

# --test PROGRAM NAME. A broken kernel may wait forever.
broken_device() {
  local backend=cuda
  [ "$2" != across ] || backend=cpu
  LD_LIBRARY_PATH=$emulated REPLAYSSM_TEST_BACKEND=$backend timeout --kill-after=10 200 "${programs[$2]}" "${@:3}" >"$copy/log" 2>&1 </dev/null
}

# The copy's test of a driver that fails, with kernels, which the tree's own build has compiled.
broken_driver() {
  ln -sfn "$root/build/kernels" "$copy/build/kernels"
  (cd "$copy" && LD_LIBRARY_PATH=$emulated REPLAYSSM_TEST_BACKEND=cuda CARGO_TARGET_DIR=$root/build/breaks-cuda-target \
    timeout --kill-after=10 500 cargo test --locked --quiet --config profile.dev.package.replayssm.opt-level=0 "$@") >"$copy/log" 2>&1 </dev/null
}

build_device() { tests/emulated/build.sh "$emulated/kernels" "$emulated" "$copy/cuda" >"$copy/log" 2>&1; }

# ggml and llama.cpp, which the tests of their adapters fetch and build: the tree's own serve the copy too. Where they cannot be had, reason
# says why.
prepare_ggml() {
  reason=$(tests/llama.sh)
  [ -z "$reason" ]
}

rm -rf "$copy"
mkdir -p "$copy/build" "$root/build/ggml"
ln -s "$root/build/ggml" "$copy/build/ggml"
cp -rp packaging Cargo.toml Cargo.lock build.rs build-support cbindgen.toml rust-toolchain.toml src cuda tests fuzz include examples-cpp "$copy"
check=false wanted=
case ${1:-} in --check) check=true ;; *) wanted=${1:-} ;; esac
red=0 total=0
while IFS='~' read -r name file change arguments; do
  [[ $name =~ $wanted ]] || continue
  total=$((total + 1))
  cp "$root/$file" "$copy/$file"
  perl -0pi -e "$change" "$copy/$file"
  if cmp -s "$root/$file" "$copy/$file"; then
    echo "does not apply: $name"
  elif $check; then
    red=$((red + 1))
  elif { [[ $file == cuda/* || $arguments == *faults* ]] && ! prepare_device; } || { [[ $arguments =~ ^--test\ ggml ]] && ! prepare_ggml; }; then
    echo "skipped: $name: $reason"
    total=$((total - 1))
  else
    run=broken build=(broken --no-run $arguments)
    if [[ $file == cuda/* ]]; then
      run=broken_device build=(build_device)
    elif [[ $arguments == *faults* ]]; then
      run=broken_driver build=(broken_driver --no-run $arguments)
      build_device || { cat "$copy/log"; exit 1; }
    fi
    # A break that does not compile would prove nothing.
    if ! "${build[@]}"; then
      echo "does not compile: $name"
      tail -20 "$copy/log"
      exit 1
    fi
    if "$run" $arguments; then
      echo "STILL GREEN: $name (cargo test $arguments)"
    elif ! grep -q '^test result: FAILED' "$copy/log"; then
      echo "ended early: $name (cargo test $arguments)"
      tail -20 "$copy/log"
    else
      echo "red: $name"
      red=$((red + 1))
    fi
  fi
  cp "$root/$file" "$copy/$file"
done < <(breaks)
if $check; then echo "breaks: $red of $total apply"; else echo "breaks: $red of $total turn their test red"; fi
[ "$red" = "$total" ] && [ "$total" != 0 ]
