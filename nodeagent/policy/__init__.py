"""Decide: pure functions of a snapshot, the state, the time and the configuration. No I/O, no clock, no thread.

Where to find a rule, in the order of a decision (`engine`; `signal_plan` for one threshold that is due):

* Which thresholds apply on this node?  `effective_thresholds`.
* When is a threshold met, and when may it act?  `thresholds`, with `trend` and `stall`.
* Which status has a condition?  `conditions`.
* What did earlier evictions release?  `in_flight`, `pending_release`.
* Does a pod exceed a limit of its own?  `local_storage_limits`, `local_storage_eviction`. Is it
  about to reach its memory limit?  `own_limits`, `own_limit_eviction`; `own_limit_resize` and `resizes` raise it.
* In which order are pods evicted?  `ranking` has the keys, `candidates` applies them; usage is from `pod_usage`, growth
  from `usage_growth`, the request from `requests`.
* Which pods are protected?  `protection`.
* Which pods are excluded for now, and may others be evicted in their place?  `out_of_reach`.
* Does the API server fail, so that a pod may be killed?  `last_resort`.
* What is tried before evictions?  `reclaim`. Is the disk usage recent enough?  `fresh_usage`.
* What does an eviction free, and which set of pods covers the deficit?  `relief`, `selection`.
* How many evictions are allowed?  `rate_limits`, `backoffs`. What stops all of them?  `preconditions`,
  `circuit_breaker`.
* What happens right before an eviction of the soft tier, or in its place?  `eviction_hook`, `eviction_request`.
* What is handed to the actuators?  `chosen_victims`. What does a message contain?  `messages`.
* Is the decision still right before the act?  `recheck`. What does an outcome change?  `outcomes`.

All memory of the decisions is one value in `state`. `victim_preview` predicts, `headroom` serves reports,
`machines` lists the state machines for the documents, `plausibility` decides which numbers are usable.
"""
