-- Idempotency keys: one job for each key of a producer, until the key expires.

create function pgqueue.take_keys(producers text[], keys text[], job_ids uuid[], ttls bigint[], again boolean) returns bigint
  language plpgsql security definer set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
  as $$
#variable_conflict use_column
declare
  had bigint;
begin
  -- Sorted, so that two statements with the same keys wait for each other instead of deadlocking.
  with taken as (
    insert into pgqueue.idempotency_keys as k (producer_id, idempotency_key, job_id, expires_at)
    select w.producer, w.key, w.job_id, pgqueue.clock() + w.ttl * interval '1 millisecond'
      from unnest(producers, keys, job_ids, ttls) w(producer, key, job_id, ttl)
     order by w.producer, w.key
    on conflict on constraint "idempotency_key is taken" do update
       set job_id = excluded.job_id, expires_at = excluded.expires_at
     where k.expires_at <= pgqueue.clock() or (again and k.job_id = excluded.job_id)
    returning 1)
  select count(*) into had from taken;
  return had;
end $$;
comment on function pgqueue.take_keys(text[], text[], uuid[], bigint[], boolean) is
  'Takes idempotency keys for jobs, expired ones in place; says how many were to be had. No key may stand twice; `again` counts those that the same jobs hold.';

create function pgqueue.jobs_take_keys(producers text[], keys text[], job_ids uuid[], ttls bigint[]) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  twice record;
begin
  select u.producer, u.key into twice from unnest(producers, keys) u(producer, key)
   group by u.producer, u.key having count(*) > 1 limit 1;
  if not found and pgqueue.take_keys(producers, keys, job_ids, ttls, true) = cardinality(keys) then
    return;
  end if;
  if twice.key is null then
    select u.producer, u.key into twice from unnest(producers, keys, job_ids) u(producer, key, job_id)
     where exists (select from pgqueue.idempotency_keys t
                    where t.producer_id = u.producer and t.idempotency_key = u.key and t.job_id <> u.job_id)
        or u.producer is null and exists (select from pgqueue.idempotency_keys t
                    where t.producer_id is null and t.idempotency_key = u.key and t.job_id <> u.job_id)
     limit 1;
  end if;
  raise exception 'idempotency_key "%" of producer % is taken', twice.key, coalesce('"' || twice.producer || '"', 'null')
    using errcode = 'unique_violation', constraint = 'idempotency_key is taken', column = 'idempotency_key',
          hint = 'pgqueue.enqueue returns the existing job instead.';
end $$;
comment on function pgqueue.jobs_take_keys is 'Takes the idempotency keys of new rows; refuses the statement when one is taken.';
