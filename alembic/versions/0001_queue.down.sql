set local lock_timeout = '2s';
set local statement_timeout = 0;
set local search_path = '';

-- Roles belong to the whole server and stay. alembic deletes its row from the table it finds here next.
drop schema pgqueue cascade;
create schema pgqueue;
create table pgqueue.alembic_version (
    version_num varchar(32) not null,
    constraint alembic_version_pkc primary key (version_num)
);
insert into pgqueue.alembic_version values ('0001');
